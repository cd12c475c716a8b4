// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

/// Signer recovery shared by the token and the signature-transfer contract.
library Ecdsa {
    /// Half the order of secp256k1: of the two valid values of `s`, only the lower one is taken,
    /// so that no third party can turn a signature into a second one for the same message.
    uint256 private constant HALF_ORDER =
        0x7fffffffffffffffffffffffffffffff5d576e7357a4501ddfe92f46681b20a0;

    /// The account that signed `digest`, or the zero address if the signature is malformed.
    function signer(bytes32 digest, uint8 v, bytes32 r, bytes32 s) internal pure returns (address) {
        if (uint256(s) > HALF_ORDER || (v != 27 && v != 28)) return address(0);
        return ecrecover(digest, v, r, s);
    }

    /// The same for the 65 bytes r ‖ s ‖ v.
    function signer(bytes32 digest, bytes memory signature) internal pure returns (address) {
        if (signature.length != 65) return address(0);
        bytes32 r;
        bytes32 s;
        uint8 v;
        assembly ("memory-safe") {
            r := mload(add(signature, 0x20))
            s := mload(add(signature, 0x40))
            v := byte(0, mload(add(signature, 0x60)))
        }
        return signer(digest, v, r, s);
    }
}
