// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {IPermit2Like} from "./IPermit2Like.sol";

interface ITokenWithPermit {
    function permit(address owner, address spender, uint256 value, uint256 deadline, uint8 v, bytes32 r, bytes32 s)
        external;
}

/// What the two x402 proxies share: the address of Permit2, the optional EIP-2612 approval, and the checks
/// that stand before every transfer.
abstract contract Permit2Proxy {
    IPermit2Like public constant PERMIT2 = IPermit2Like(0x000000000022D473030F116dDEE9F6B43aC78BA3);

    struct EIP2612Permit {
        uint256 value;
        uint256 deadline;
        bytes32 r;
        bytes32 s;
        uint8 v;
    }

    event Settled();
    event SettledWithPermit();

    error InvalidAmount();
    error InvalidDestination();
    error InvalidOwner();
    error PaymentTooEarly();
    error Permit2612AmountMismatch();

    function _check(address owner, address to, uint256 validAfter, uint256 amount) internal view {
        if (owner == address(0)) revert InvalidOwner();
        if (to == address(0)) revert InvalidDestination();
        if (amount == 0) revert InvalidAmount();
        if (block.timestamp < validAfter) revert PaymentTooEarly();
    }

    function _approveBySignature(
        EIP2612Permit calldata permit2612,
        IPermit2Like.PermitTransferFrom calldata permit,
        address owner
    ) internal {
        if (permit2612.value != permit.permitted.amount) revert Permit2612AmountMismatch();
        ITokenWithPermit token = ITokenWithPermit(permit.permitted.token);
        // Anybody may submit the approval first. That must not stop the payment: what counts is the allowance,
        // and Permit2 finds out whether it is there.
        try token.permit(
            owner, address(PERMIT2), permit2612.value, permit2612.deadline, permit2612.v, permit2612.r, permit2612.s
        ) {} catch {}
    }
}
