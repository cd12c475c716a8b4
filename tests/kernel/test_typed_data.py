"""What is signed for each scheme, and that nothing else is."""

import pytest
from msgspec.structs import replace

from tests.kernel.rows import ONE, UPTO
from x402guard.errors import IllegalTransition
from x402guard.kernel.typed_data import PERMIT2, cancellation_data, typed_data

EXACT, BY_PERMIT = ONE.intent, UPTO.intent


@pytest.mark.parametrize(
    ("scheme", "method"), [("exact", "eip2612"), ("upto", "eip3009"), ("batch", "permit2"), ("", "")]
)
def test_another_scheme_or_method_is_not_signed(scheme, method):
    with pytest.raises(IllegalTransition, match=f"no scheme '{scheme}' by '{method}'"):
        typed_data(replace(EXACT, scheme=scheme, method=method))


def test_an_upto_names_who_may_settle_it():
    with pytest.raises(IllegalTransition, match="facilitator"):
        typed_data(replace(BY_PERMIT, facilitator=None))


def test_only_an_authorization_of_the_token_is_cancelled():
    made = cancellation_data(EXACT)
    assert (made.primary, made.domain.contract) == ("CancelAuthorization", EXACT.token)
    assert made.message == {"authorizer": EXACT.payer, "nonce": f"0x{EXACT.nonce:064x}"}
    with pytest.raises(ValueError, match="a signature cannot cancel a permit2 payment"):
        cancellation_data(replace(EXACT, method="permit2"))


def test_the_permits_name_permit2_and_the_spender():
    made = typed_data(replace(BY_PERMIT, facilitator=EXACT.payee))
    assert (made.domain.name, made.domain.contract) == ("Permit2", PERMIT2)
    assert list(made.types) == ["PermitWitnessTransferFrom", "TokenPermissions", "Witness"]
