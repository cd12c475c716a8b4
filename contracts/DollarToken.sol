// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {Ecdsa} from "./Ecdsa.sol";

/// A dollar token for test networks: ERC-20 with EIP-3009 and EIP-2612, and a mint that is open to all.
/// There is no constructor and no immutable, so the runtime code can be placed at any address.
contract DollarToken {
    string public constant name = "USDC";
    string public constant symbol = "USDC";
    string public constant version = "2";
    uint8 public constant decimals = 6;

    bytes32 public constant TRANSFER_WITH_AUTHORIZATION_TYPEHASH = keccak256(
        "TransferWithAuthorization(address from,address to,uint256 value,uint256 validAfter,uint256 validBefore,bytes32 nonce)"
    );
    bytes32 public constant RECEIVE_WITH_AUTHORIZATION_TYPEHASH = keccak256(
        "ReceiveWithAuthorization(address from,address to,uint256 value,uint256 validAfter,uint256 validBefore,bytes32 nonce)"
    );
    bytes32 public constant CANCEL_AUTHORIZATION_TYPEHASH =
        keccak256("CancelAuthorization(address authorizer,bytes32 nonce)");
    bytes32 public constant PERMIT_TYPEHASH =
        keccak256("Permit(address owner,address spender,uint256 value,uint256 nonce,uint256 deadline)");

    uint256 public totalSupply;
    mapping(address account => uint256) public balanceOf;
    mapping(address owner => mapping(address spender => uint256)) public allowance;
    mapping(address owner => uint256) public nonces;
    mapping(address authorizer => mapping(bytes32 nonce => bool)) public authorizationState;

    event Transfer(address indexed from, address indexed to, uint256 value);
    event Approval(address indexed owner, address indexed spender, uint256 value);
    event AuthorizationUsed(address indexed authorizer, bytes32 indexed nonce);
    event AuthorizationCanceled(address indexed authorizer, bytes32 indexed nonce);

    struct Authorization {
        address from;
        address to;
        uint256 value;
        uint256 validAfter;
        uint256 validBefore;
        bytes32 nonce;
    }

    // ---- ERC-20 ----

    function mint(address to, uint256 value) external {
        totalSupply += value;
        balanceOf[to] += value;
        emit Transfer(address(0), to, value);
    }

    function approve(address spender, uint256 value) external returns (bool) {
        _approve(msg.sender, spender, value);
        return true;
    }

    function transfer(address to, uint256 value) external returns (bool) {
        _transfer(msg.sender, to, value);
        return true;
    }

    function transferFrom(address from, address to, uint256 value) external returns (bool) {
        uint256 allowed = allowance[from][msg.sender];
        require(allowed >= value, "DollarToken: transfer amount exceeds allowance");
        // An allowance of the largest number stands for "no limit" and is not used up.
        if (allowed != type(uint256).max) allowance[from][msg.sender] = allowed - value;
        _transfer(from, to, value);
        return true;
    }

    // ---- EIP-3009 ----

    function transferWithAuthorization(
        address from,
        address to,
        uint256 value,
        uint256 validAfter,
        uint256 validBefore,
        bytes32 nonce,
        uint8 v,
        bytes32 r,
        bytes32 s
    ) external {
        Authorization memory a = Authorization(from, to, value, validAfter, validBefore, nonce);
        bytes32 digest = _authorizationDigest(TRANSFER_WITH_AUTHORIZATION_TYPEHASH, a);
        _transferAuthorized(a, Ecdsa.signer(digest, v, r, s));
    }

    function transferWithAuthorization(
        address from,
        address to,
        uint256 value,
        uint256 validAfter,
        uint256 validBefore,
        bytes32 nonce,
        bytes calldata signature
    ) external {
        Authorization memory a = Authorization(from, to, value, validAfter, validBefore, nonce);
        bytes32 digest = _authorizationDigest(TRANSFER_WITH_AUTHORIZATION_TYPEHASH, a);
        _transferAuthorized(a, Ecdsa.signer(digest, signature));
    }

    function receiveWithAuthorization(
        address from,
        address to,
        uint256 value,
        uint256 validAfter,
        uint256 validBefore,
        bytes32 nonce,
        uint8 v,
        bytes32 r,
        bytes32 s
    ) external {
        require(to == msg.sender, "DollarToken: caller must be the payee");
        Authorization memory a = Authorization(from, to, value, validAfter, validBefore, nonce);
        bytes32 digest = _authorizationDigest(RECEIVE_WITH_AUTHORIZATION_TYPEHASH, a);
        _transferAuthorized(a, Ecdsa.signer(digest, v, r, s));
    }

    function receiveWithAuthorization(
        address from,
        address to,
        uint256 value,
        uint256 validAfter,
        uint256 validBefore,
        bytes32 nonce,
        bytes calldata signature
    ) external {
        require(to == msg.sender, "DollarToken: caller must be the payee");
        Authorization memory a = Authorization(from, to, value, validAfter, validBefore, nonce);
        bytes32 digest = _authorizationDigest(RECEIVE_WITH_AUTHORIZATION_TYPEHASH, a);
        _transferAuthorized(a, Ecdsa.signer(digest, signature));
    }

    function cancelAuthorization(address authorizer, bytes32 nonce, uint8 v, bytes32 r, bytes32 s) external {
        _cancel(authorizer, nonce, Ecdsa.signer(_cancelDigest(authorizer, nonce), v, r, s));
    }

    function cancelAuthorization(address authorizer, bytes32 nonce, bytes calldata signature) external {
        _cancel(authorizer, nonce, Ecdsa.signer(_cancelDigest(authorizer, nonce), signature));
    }

    // ---- EIP-2612 ----

    function permit(address owner, address spender, uint256 value, uint256 deadline, uint8 v, bytes32 r, bytes32 s)
        external
    {
        require(block.timestamp <= deadline, "DollarToken: permit is expired");
        bytes32 structHash = keccak256(abi.encode(PERMIT_TYPEHASH, owner, spender, value, nonces[owner]++, deadline));
        _requireSigner(owner, Ecdsa.signer(_digest(structHash), v, r, s));
        _approve(owner, spender, value);
    }

    function DOMAIN_SEPARATOR() public view returns (bytes32) {
        return keccak256(
            abi.encode(
                keccak256("EIP712Domain(string name,string version,uint256 chainId,address verifyingContract)"),
                keccak256(bytes(name)),
                keccak256(bytes(version)),
                block.chainid,
                address(this)
            )
        );
    }

    // ---- shared ----

    function _transferAuthorized(Authorization memory a, address signedBy) private {
        require(block.timestamp > a.validAfter, "DollarToken: authorization is not yet valid");
        require(block.timestamp < a.validBefore, "DollarToken: authorization is expired");
        _requireUnused(a.from, a.nonce);
        _requireSigner(a.from, signedBy);
        authorizationState[a.from][a.nonce] = true;
        emit AuthorizationUsed(a.from, a.nonce);
        _transfer(a.from, a.to, a.value);
    }

    function _cancel(address authorizer, bytes32 nonce, address signedBy) private {
        _requireUnused(authorizer, nonce);
        _requireSigner(authorizer, signedBy);
        authorizationState[authorizer][nonce] = true;
        emit AuthorizationCanceled(authorizer, nonce);
    }

    function _transfer(address from, address to, uint256 value) private {
        require(to != address(0), "DollarToken: transfer to the zero address");
        uint256 balance = balanceOf[from];
        require(balance >= value, "DollarToken: transfer amount exceeds balance");
        balanceOf[from] = balance - value;
        balanceOf[to] += value;
        emit Transfer(from, to, value);
    }

    function _approve(address owner, address spender, uint256 value) private {
        allowance[owner][spender] = value;
        emit Approval(owner, spender, value);
    }

    function _requireUnused(address authorizer, bytes32 nonce) private view {
        require(!authorizationState[authorizer][nonce], "DollarToken: authorization is used or canceled");
    }

    function _requireSigner(address expected, address signedBy) private pure {
        // A failed recovery gives the zero address, which must never count as somebody's consent.
        require(signedBy != address(0) && signedBy == expected, "DollarToken: invalid signature");
    }

    function _authorizationDigest(bytes32 typeHash, Authorization memory a) private view returns (bytes32) {
        return _digest(
            keccak256(abi.encode(typeHash, a.from, a.to, a.value, a.validAfter, a.validBefore, a.nonce))
        );
    }

    function _cancelDigest(address authorizer, bytes32 nonce) private view returns (bytes32) {
        return _digest(keccak256(abi.encode(CANCEL_AUTHORIZATION_TYPEHASH, authorizer, nonce)));
    }

    function _digest(bytes32 structHash) private view returns (bytes32) {
        return keccak256(abi.encodePacked("\x19\x01", DOMAIN_SEPARATOR(), structHash));
    }
}
