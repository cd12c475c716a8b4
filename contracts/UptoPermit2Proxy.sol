// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {IPermit2Like} from "./IPermit2Like.sol";
import {Permit2Proxy} from "./Permit2Proxy.sol";

/// The signed spender of x402's `upto` scheme: it pays at most the permitted amount to the signed payee, and only
/// when the signed facilitator asks.
contract UptoPermit2Proxy is Permit2Proxy {
    struct Witness {
        address to;
        address facilitator;
        uint256 validAfter;
    }

    bytes32 public constant WITNESS_TYPEHASH = keccak256("Witness(address to,address facilitator,uint256 validAfter)");
    string public constant WITNESS_TYPE_STRING =
        "Witness witness)TokenPermissions(address token,uint256 amount)Witness(address to,address facilitator,uint256 validAfter)";

    error AmountExceedsPermitted();
    error UnauthorizedFacilitator();

    function settle(
        IPermit2Like.PermitTransferFrom calldata permit,
        uint256 amount,
        address owner,
        Witness calldata witness,
        bytes calldata signature
    ) external {
        _pay(permit, amount, owner, witness, signature);
        emit Settled();
    }

    function settleWithPermit(
        EIP2612Permit calldata permit2612,
        IPermit2Like.PermitTransferFrom calldata permit,
        uint256 amount,
        address owner,
        Witness calldata witness,
        bytes calldata signature
    ) external {
        _approveBySignature(permit2612, permit, owner);
        _pay(permit, amount, owner, witness, signature);
        emit SettledWithPermit();
    }

    function _pay(
        IPermit2Like.PermitTransferFrom calldata permit,
        uint256 amount,
        address owner,
        Witness calldata witness,
        bytes calldata signature
    ) private {
        _check(owner, witness.to, witness.validAfter, amount);
        if (amount > permit.permitted.amount) revert AmountExceedsPermitted();
        if (msg.sender != witness.facilitator) revert UnauthorizedFacilitator();
        PERMIT2.permitWitnessTransferFrom(
            permit,
            IPermit2Like.SignatureTransferDetails(witness.to, amount),
            owner,
            keccak256(abi.encode(WITNESS_TYPEHASH, witness.to, witness.facilitator, witness.validAfter)),
            WITNESS_TYPE_STRING,
            signature
        );
    }
}
