// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {Ecdsa} from "./Ecdsa.sol";
import {IPermit2Like} from "./IPermit2Like.sol";

interface IToken {
    function transferFrom(address from, address to, uint256 value) external returns (bool);
}

/// Signature transfers with the interface, the EIP-712 types and the nonces of Permit2, for test networks.
/// As there, the spender that is signed is the caller, and the use of a nonce emits no event.
contract Permit2Like is IPermit2Like {
    bytes32 private constant DOMAIN_TYPEHASH =
        keccak256("EIP712Domain(string name,uint256 chainId,address verifyingContract)");
    bytes32 private constant TOKEN_PERMISSIONS_TYPEHASH = keccak256("TokenPermissions(address token,uint256 amount)");
    bytes32 private constant TRANSFER_TYPEHASH = keccak256(
        "PermitTransferFrom(TokenPermissions permitted,address spender,uint256 nonce,uint256 deadline)TokenPermissions(address token,uint256 amount)"
    );
    string private constant WITNESS_TRANSFER_TYPE_START =
        "PermitWitnessTransferFrom(TokenPermissions permitted,address spender,uint256 nonce,uint256 deadline,";

    /// For each owner, 256 nonces a word: the upper 248 bits of a nonce choose the word, the lower 8 the bit.
    mapping(address owner => mapping(uint256 wordPos => uint256 bits)) public nonceBitmap;

    event UnorderedNonceInvalidation(address indexed owner, uint256 word, uint256 mask);

    error SignatureExpired(uint256 signatureDeadline);
    error InvalidAmount(uint256 maxAmount);
    error InvalidNonce();
    error InvalidSigner();
    error TransferFailed();

    function permitTransferFrom(
        PermitTransferFrom calldata permit,
        SignatureTransferDetails calldata transferDetails,
        address owner,
        bytes calldata signature
    ) external {
        bytes32 structHash = keccak256(
            abi.encode(TRANSFER_TYPEHASH, _permissionsHash(permit), msg.sender, permit.nonce, permit.deadline)
        );
        _settle(permit, transferDetails, owner, structHash, signature);
    }

    function permitWitnessTransferFrom(
        PermitTransferFrom calldata permit,
        SignatureTransferDetails calldata transferDetails,
        address owner,
        bytes32 witness,
        string calldata witnessTypeString,
        bytes calldata signature
    ) external {
        bytes32 typeHash = keccak256(abi.encodePacked(WITNESS_TRANSFER_TYPE_START, witnessTypeString));
        bytes32 structHash = keccak256(
            abi.encode(typeHash, _permissionsHash(permit), msg.sender, permit.nonce, permit.deadline, witness)
        );
        _settle(permit, transferDetails, owner, structHash, signature);
    }

    function invalidateUnorderedNonces(uint256 wordPos, uint256 mask) external {
        nonceBitmap[msg.sender][wordPos] |= mask;
        emit UnorderedNonceInvalidation(msg.sender, wordPos, mask);
    }

    function DOMAIN_SEPARATOR() public view returns (bytes32) {
        return keccak256(abi.encode(DOMAIN_TYPEHASH, keccak256("Permit2"), block.chainid, address(this)));
    }

    function _settle(
        PermitTransferFrom calldata permit,
        SignatureTransferDetails calldata transferDetails,
        address owner,
        bytes32 structHash,
        bytes calldata signature
    ) private {
        if (block.timestamp > permit.deadline) revert SignatureExpired(permit.deadline);
        if (transferDetails.requestedAmount > permit.permitted.amount) revert InvalidAmount(permit.permitted.amount);

        uint256 bit = 1 << uint8(permit.nonce);
        uint256 word = nonceBitmap[owner][permit.nonce >> 8];
        if (word & bit != 0) revert InvalidNonce();
        nonceBitmap[owner][permit.nonce >> 8] = word | bit;

        bytes32 digest = keccak256(abi.encodePacked("\x19\x01", DOMAIN_SEPARATOR(), structHash));
        address signedBy = Ecdsa.signer(digest, signature);
        if (signedBy == address(0) || signedBy != owner) revert InvalidSigner();

        IToken token = IToken(permit.permitted.token);
        if (!token.transferFrom(owner, transferDetails.to, transferDetails.requestedAmount)) revert TransferFailed();
    }

    function _permissionsHash(PermitTransferFrom calldata permit) private pure returns (bytes32) {
        return keccak256(abi.encode(TOKEN_PERMISSIONS_TYPEHASH, permit.permitted.token, permit.permitted.amount));
    }
}
