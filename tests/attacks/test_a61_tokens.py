"""A61: what a token is worth is never a setting's word."""

import httpx
import pytest

from tests.support.chain import MockChain
from tests.support.command_line import typed
from tests.support.merchant import NETWORK, USDC, Shop, accept, make_guard, offer_response, required
from tests.support.merchant import client as over
from x402guard import Asset, ConfigError, GuardedTransport, LocalSigner, Policy, PolicyDenied
from x402guard.assets import AssetRegistry, published
from x402guard.flow.ports import TokenSays
from x402guard.kernel.typed_data import token_separator
from x402guard.testing import Testnet
from x402guard.testing.contracts import TOKEN

OWN = {"network": NETWORK, "address": USDC, "symbol": "USDC", "decimals": 6, "name": "USDC", "version": "2"}
OTHER = "0x" + "22" * 20
EURT = Asset(NETWORK, OTHER, "EURT", 6, "Euro Thing", "1", usd="1.10")
OFFER = {"asset": OTHER, "extra": {"name": "Euro Thing", "version": "1"}}
WRONG = {"decimals": (6, 9), "name": ("USDC", "USD Coin"), "version": ("2", "1"), "usd": ("1.00", "0.000001")}


@pytest.mark.parametrize("name", WRONG)
def test_a61_a_built_in_token_is_not_replaced(name):
    built_in, said = WRONG[name]
    with pytest.raises(ConfigError) as caught:
        make_guard(assets=[Asset(**OWN | {name: said})])
    text = str(caught.value)
    assert f"has {name} {built_in!r} built in" in text
    assert f"here {said!r}" in text
    assert "unsafe_replace_builtin" in text


def test_a61_only_code_says_otherwise_and_who_repeats_what_is_built_in_says_nothing():
    make_guard(assets=[Asset(**OWN, usd="1")]).close()
    make_guard(assets=[Asset(**OWN | {"decimals": 9}, unsafe_replace_builtin=True)]).close()
    with pytest.raises(ConfigError, match="named twice, once with decimals 6, and here 9"):
        make_guard(assets=[EURT, Asset(NETWORK, OTHER, "EURT", 9, "Euro Thing", "1", usd="1.10")])
    with pytest.raises(ConfigError, match="unsafe_replace_builtin: 1 is not True or False"):
        Asset(**OWN, unsafe_replace_builtin=1)


TABLE = (
    '[[assets]]\nnetwork = "base-sepolia"\naddress = "{}"\nsymbol = "X"\ndecimals = {}\nname = "USDC"\nversion = "2"\n'
)


@pytest.mark.parametrize(
    "words", [("doctor",), ("policy", "check", "x402guard.toml"), ("pay", "http://127.0.0.1:9/", "--budget", "1.00")]
)
def test_a61_no_setting_says_otherwise(tmp_path, words):
    (tmp_path / "x402guard.toml").write_text(TABLE.format(USDC, 9) + "unsafe_replace_builtin = true\n")
    said = typed(*words, cwd=tmp_path)
    assert said.returncode
    assert "unsafe_replace_builtin" in said.stdout + said.stderr
    (tmp_path / "x402guard.toml").write_text(TABLE.format(USDC, 9))
    said = typed(*words, cwd=tmp_path)
    assert said.returncode
    assert "has decimals 6 built in, and here 9" in said.stdout + said.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["x402guard.toml"]


class Asked(MockChain):
    """A chain whose tokens say what they are told to."""

    def __init__(self, says):
        super().__init__()
        self.says, self.tokens = says, []

    def token(self, network, contract, *, signs):
        self.tokens.append((network, contract, signs))
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


RIGHT = TokenSays(6, token_separator(84532, EURT.contract, "Euro Thing", "1"))
DOUBTS = {
    "decimals": (
        TokenSays(18, RIGHT.separator),
        "has 18 decimals, as its contract says, and the entry of assets says 6",
    ),
    "domain": (TokenSays(6, b"\1" * 32), "signs under another name or version than 'Euro Thing' and '1'"),
    "no domain": (TokenSays(6, None), "shows no DOMAIN_SEPARATOR"),
    "nothing": (None, "no endpoint says what EURT"),
    "a reader that fails": (RuntimeError("x"), "no endpoint says what EURT"),
}


def buys(chain, asset=EURT, **options):
    """The answer of a seller who takes the token, and how many payments he was shown."""
    paid = []

    def seller(request):
        if "payment-signature" not in request.headers:
            return offer_response(required(accept(**OFFER)))
        paid.append(request)
        return httpx.Response(200)

    with make_guard(chains=chain, assets=[asset], **options) as guard, guard.session("s", budget="$1.00") as session:
        with over(session, seller) as http:
            return http.get("https://shop.example/1").status_code, len(paid)


@pytest.mark.parametrize("name", DOUBTS)
def test_a61_a_token_that_is_added_is_asked_what_it_is(name):
    says, reason = DOUBTS[name]
    with pytest.raises(PolicyDenied, match=reason) as caught:
        buys(Asked(says))
    assert caught.value.rule == "asset_unproven"


def test_a61_one_that_says_the_same_is_paid_with_and_a_built_in_one_is_not_asked():
    chain = Asked(RIGHT)
    assert buys(chain) == (200, 1)
    assert chain.tokens == [(NETWORK, OTHER, True)]
    with make_guard(chains=chain, assets=[EURT]) as guard, guard.session("s", budget="$1.00") as session:
        with over(session, Shop()) as http:
            assert http.get("https://shop.example/1").status_code == 200
    assert len(chain.tokens) == 1


def test_a61_without_a_chain_it_is_refused_but_by_unsafe_no_chain():
    with pytest.raises(PolicyDenied, match="asset_unproven"):
        buys(None)
    with pytest.raises(PolicyDenied, match="asset_unproven"):
        buys(MockChain())  # a reader that asks no token
    assert buys(None, unsafe_no_chain=True) == (200, 1)
    with pytest.raises(PolicyDenied, match="18 decimals"):
        buys(Asked(TokenSays(18, None)), unsafe_no_chain=True)


def test_a61_a_token_that_only_permit2_moves_needs_no_domain():
    chain = Asked(TokenSays(6, None))
    plain = Asset(NETWORK, OTHER, "EURT", 6, "Euro Thing", "1", usd="1.10", methods={"permit2"})
    assert buys(chain, plain) == (200, 1)
    assert chain.tokens == [(NETWORK, OTHER, False)]


@pytest.mark.chain
def test_a61_on_a_real_chain_five_dollars_are_not_half_a_cent(tmp_path):
    """The script of an outsider: decimals 9 for 6. Nothing leaves the wallet, and every command names the figure."""
    with Testnet(chain_id=11_155_111) as net:
        right = Asset("eip155:11155111", TOKEN, "USDC", 6, "USDC", "2")
        for asset, wrong in ((Asset("eip155:11155111", TOKEN, "USDC", 9, "USDC", "2"), "6 decimals"),
                             (Asset("eip155:11155111", TOKEN, "USDC", 6, "USDC", "3"), "registry has '3'"),
                             (right, None)):  # fmt: skip
            before = net.balance(net.payee)
            signer = LocalSigner.from_key(net.payer_key)
            with make_guard(signer=signer, chains={"eip155:11155111": net.rpc}, assets=[asset]) as guard:
                with guard.session("s", budget="$1.00") as session:
                    with httpx.Client(transport=GuardedTransport(session), trust_env=False) as http:
                        if wrong is None:
                            assert http.get(f"{net.merchant.url}/cents/1").status_code == 200
                        else:
                            with pytest.raises(PolicyDenied, match=wrong):
                                http.get(f"{net.merchant.url}/cents/1")
            assert net.balance(net.payee) - before == (0 if wrong else 10_000)
        chains = f'[chains]\n"eip155:11155111" = "{net.rpc}"\n'
        entry = TABLE.replace("base-sepolia", "eip155:11155111")
        for decimals, code in ((9, 1), (6, 0)):
            (tmp_path / "x402guard.toml").write_text(chains + entry.format(TOKEN, decimals))
            for words in (("doctor",), ("policy", "check", "x402guard.toml")):
                done = typed(*words, cwd=tmp_path, X402GUARD_CONFIG=str(tmp_path / "x402guard.toml"))
                text = done.stdout + done.stderr
                assert bool(done.returncode) == bool(code), text
                assert ("has 6 decimals, as its contract says" in text) == bool(code)
                assert ("counts $1.00 a token, by the settings" in text) == (not code or words == ("doctor",))


@pytest.mark.parametrize("token", published(), ids=lambda token: token.network)
def test_a61_a_published_token_is_asked_as_an_added_one_is(token):
    """Its figures are its issuer's word on a page: nothing is signed before the contract has said the same."""
    offer = accept(network=token.network, asset=token.address, extra={"name": token.name, "version": token.version})
    shop = Shop(required(offer))
    policy = Policy(networks={token.network})
    right = TokenSays(6, token_separator(token.chain_id, token.contract, token.name, token.version))
    for says, paid in ((right, 1), (TokenSays(6, b"\1" * 32), 0), (TokenSays(18, right.separator), 0)):
        chain = Asked(says)
        chain.networks = frozenset({token.network})
        with make_guard(chains=chain, policy=policy) as guard, guard.session("s", budget="$1.00") as session:
            with over(session, lambda r: httpx.Response(200) if "payment-signature" in r.headers else shop(r)) as http:
                try:
                    http.get("https://shop.example/1")
                    assert paid
                except PolicyDenied as refused:
                    assert (refused.rule, paid) == ("asset_unproven", 0)


def test_a61_an_owner_corrects_a_published_figure():
    wrong = published()[-1]
    own = Asset(wrong.network, wrong.address, "USDC.e", 6, wrong.name, "1")
    assert AssetRegistry([own]).find(own.network, own.contract) is own
    assert AssetRegistry([own]).added() == (own,)
    assert AssetRegistry().added() == ()


def test_a61_eurc_is_refused_until_its_owner_says_what_it_is_worth():
    offer = accept(asset="0x808456652fdb597867f38412077A9182bf77359F", extra={"name": "EURC", "version": "2"})
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(
            PolicyDenied, match=r'is EURC.*Asset\("eip155:84532", "0x8084.*", "EURC", 6, "EURC", "2", usd="…"\)'
        ):
            with over(session, Shop(required(offer))) as http:
                http.get("https://shop.example/1")
    own = Asset("eip155:84532", "0x808456652fdb597867f38412077A9182bf77359F", "EURC", 6, "EURC", "2", usd="1.20")
    with make_guard(assets=[own], unsafe_no_chain=True) as guard, guard.session("s", budget="$1.00") as session:
        sold = lambda r: httpx.Response(200) if "payment-signature" in r.headers else Shop(required(offer))(r)
        with over(session, sold) as http:
            assert http.get("https://shop.example/1").status_code == 200
        assert str(session.held) == "0.012"
