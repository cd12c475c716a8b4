"""What a caller is told of a payment."""

from msgspec.structs import replace

from tests.support.ledger import a_hold, an_intent
from x402guard.flow.receipt import receipt_of, undelivered


def test_the_error_about_what_did_not_come_carries_the_identifier_that_goes_with_it_again():
    intent = replace(an_intent(), payment_id="pay_" + "0" * 32)
    for hold, said in ((a_hold(intent=intent), intent.payment_id), (a_hold(), None)):
        receipt = receipt_of(hold)
        assert (receipt.payment_id, undelivered("no answer came", receipt).payment_id) == (said, said)
