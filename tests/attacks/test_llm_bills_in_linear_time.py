"""What a reviewer from outside has tried, so that a request or an answer stops an event loop: time grows with size alone."""

import base64
import time

import pytest

from tests.attacks.test_llm_bills_from_outside import CLAUDE, ENDED, FORM, OPENAI, Books, asked, iterations
from x402guard.errors import X402GuardError

GEMINI = "https://generativelanguage.googleapis.com/v1beta/models"


def test_a_form_is_read_in_linear_time():
    def seconds(times):
        begun = time.process_time()
        with pytest.raises(X402GuardError):
            Books({}).post(f"{OPENAI}/audio/transcriptions", content=b"name=model\n" * times, headers=FORM)
        return time.process_time() - begun

    seconds(10)
    assert seconds(64_000) < max(0.25, 12 * seconds(8_000))


def test_many_pictures_are_held_in_linear_time():
    head = b"\x89PNG\r\n\x1a\n" + bytes(8) + (512).to_bytes(4) * 2 + bytes(50)
    picture = {"inlineData": {"mimeType": "image/png", "data": base64.b64encode(head).decode()}}
    used = {"promptTokenCount": 9, "candidatesTokenCount": 1, "totalTokenCount": 10}

    def seconds(times):
        said = {"contents": [{"parts": [picture] * times}], "generationConfig": {"maxOutputTokens": 9}}
        begun = time.process_time()
        Books({"candidates": [], "usageMetadata": used}).post(f"{GEMINI}/gemini-3.5-flash:generateContent", said)
        return time.process_time() - begun

    seconds(10)
    assert seconds(1_600) < 0.5 + 12 * seconds(200)


def test_many_rounds_are_billed_in_linear_time():
    def seconds(times):
        rounds = [{"model": "x", "a": 1}, {"a": 1}] * times
        begun = time.process_time()
        Books(iterations(*rounds)).post(CLAUDE, asked("claude-sonnet-5"))
        return time.process_time() - begun

    seconds(10)
    assert seconds(4_000) < 1 + 12 * seconds(500)


def test_the_name_of_a_model_costs_no_time():
    begun = time.process_time()
    answer = {**ENDED, "model": "a" * 800_000, "usage": {"prompt_tokens": 9_000, "completion_tokens": 10}}
    Books(answer).post(f"{OPENAI}/chat/completions", asked("gpt-4o"))
    assert time.process_time() - begun < 2
