"""What agents do: buy, call models, use tools, nest budgets, leave. And the providers of models, who may claim wrongly."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from x402guard.errors import (
    ConfigError,
    PaidNotDelivered,
    X402GuardError,
)
from x402guard.flow.context import Context
from x402guard.flow.effects import Flow, PeekBody, Reply, Send
from x402guard.flow.receipt import Receipt
from x402guard.flow.refusals import refused
from x402guard.flow.request import RequestFacts
from x402guard.frozen import replace
from x402guard.http.answer_end import AnswerEnding, note_answer
from x402guard.http.routed import metered_request
from x402guard.kernel.rows import Delivery, Hold, Nanos, NodeKind
from x402guard.ledger.authorize import Refusal
from x402guard.llm.flow import InFlight, Upload, end_call
from x402guard.llm.meter import classify
from x402guard.testing.simulator.books import Actor, Books
from x402guard.testing.simulator.draws import Draws
from x402guard.testing.simulator.machine import Agent
from x402guard.testing.simulator.market import SELLERS_WORDS, Want, signed_of
from x402guard.testing.simulator.network import Shopping
from x402guard.testing.simulator.tasks import Task, Tasks, failing
from x402guard.testing.simulator.world import Violation, World
from x402guard.tools.arguments import Readable
from x402guard.tools.flow import HeldTool, ToolCall, ToolEnd, charge_tool, end_tool, hold_tool
from x402guard.vendors.routes import Route
from x402guard.x402.delivery import AnswerEnd
from x402guard.x402.flow import paid_request
from x402guard.x402.settlement import succeeded

CHAT: Final = "https://api.openai.com/v1/chat/completions"
INPUT_NANOS: Final = 2_500
OUTPUT_NANOS: Final = 10_000
"""The prices of the simulated model, in nano-dollars a token."""

REDIRECTED: Final = 303
_HOP_MS: Final = (0, 0, 1, 20, 500, 8_000, 70_000)
_EMPTY: Final = hashlib.sha256(b"").hexdigest()
_LLM: Final = {
    "answers": 12,
    "lost": 2,
    "limited": 1,
    "fails": 2,
    "fails_silently": 1,
    "inflates": 2,
    "says_nothing": 1,
    "asks_402": 1,
}


@dataclass(frozen=True, slots=True)
class _Bought:
    """One request for a want, as its agent has it in hand."""

    agent: Agent
    want: Want
    generation: int
    shopping: Shopping
    context: Context
    draws: Draws


class Agents:
    """Everything that agents do in a run."""

    def __init__(self, world: World, books: Books, tasks: Tasks) -> None:
        self._world, self._books, self._tasks = world, books, tasks
        tasks.on_signed = self._signed

    def _signed(self, hold: Hold, task: Task[Any]) -> None:
        if hold.id not in self._books.signed and task.actor.want is not None:
            signed = signed_of(hold, task.actor.want, task.actor.generation, self._world.time.ms)
            self._books.signed[hold.id] = signed
            task.actor.want.signed.append(signed)
            self._world.counts.payments += 1

    def _context(self, agent: Agent) -> Context | None:
        """Return the settings of the innermost budget of an agent; None if its session has ended."""
        try:
            return agent.run(lambda: agent.session.innermost().context)
        except X402GuardError:
            return None

    # -- payments -----------------------------------------------------------------------------------------------------

    def buys(
        self, agent: Agent, want: Want, draws: Draws, on_end: Callable[[BaseException | None], None] | None = None
    ) -> None:
        """Ask for a want, and pay for it."""
        context = self._context(agent)
        if context is None:
            return
        again = self._world.goes_wrong("again", 0.02, draws)
        if again:
            want.excuses[want.generation] = "pay_again"
        facts = RequestFacts(
            "GET", want.url, f"https://{want.host}:443", want.host, True, False, _EMPTY, draws.octets(32),  # noqa: FBT003 - as the class has them
            purchase=want.name if want.named else None, pay_again=again, body=b"",
        )  # fmt: skip
        shopping = Shopping(self._world, want, self._books.signed)
        want.under_way += 1
        generation = want.generation

        def ended(value: Receipt | None, error: BaseException | None) -> None:
            want.under_way -= 1
            how = "receipt" if value is not None else "no payment" if error is None else type(error).__name__
            rule = getattr(error, "rule", "")
            self._world.coverage.notes[f"request ends: {how}{f' ({rule})' if rule else ''}"] += 1
            if isinstance(error, PaidNotDelivered) and 0 < shopping.paid_status < 400:
                raise Violation("answer-withheld", f"{want}: the goods came, and the agent hears: {error}")
            if isinstance(error, PaidNotDelivered) and want.generation == generation:
                want.given_up()
            if value is not None:
                self._reads(_Bought(agent, want, generation, shopping, context, draws), value)
            if on_end is not None:
                on_end(error)

        self._tasks.begin(
            "payment", paid_request(facts, context), agent.process, draws,
            context=context, line=shopping, want=want, on_end=ended,
        )  # fmt: skip

    def _reads(self, bought: _Bought, receipt: Receipt) -> None:
        """Read the body of the paid answer: to its end, or until it breaks."""
        context, draws, world = bought.context, bought.draws, self._world
        guard, status, broke = bought.agent.process.guard, bought.shopping.status, bought.shopping.broke
        if guard is None:
            return
        ending = AnswerEnding(context, receipt, guard.shell, success=succeeded(status), broke=broke)
        end: AnswerEnd = "whole"
        if world.goes_wrong("cut", 0.12, draws):
            end = "cut"
        elif world.goes_wrong("late", 0.03, draws) and receipt.delivery == Delivery.OPEN:
            end = "late"
        if status == REDIRECTED and end == "whole":
            self._follows(bought, receipt, ending)
        else:
            self._ends(bought, receipt, ending, end, had=end == "whole" and succeeded(status) and not broke)

    def _ends(self, bought: _Bought, receipt: Receipt, ending: AnswerEnding, end: AnswerEnd, *, had: bool) -> None:
        """Let an answer come to its end in a while. *had*: its caller has the goods then."""
        want, context, draws, world = bought.want, bought.context, bought.draws, self._world
        process, guard = bought.agent.process, bought.agent.process.guard

        def reads() -> bool:
            if guard is None or process.guard is not guard:
                return False  # it has died meanwhile
            signed = self._books.signed[receipt.hold_id]
            (signed.read_by.add if had else signed.read_by.discard)(receipt.presented)
            signed.cut_in = None if had else guard
            if had and want.generation == bought.generation:
                want.had()

            def noted(_value: None, error: BaseException | None) -> None:
                signed.cut_in = guard if error is not None else None
                signed.handed_over = receipt.presented if had and error is None else signed.handed_over
                ending.gone()

            if guard.shell.late_writes is None:
                self._tasks.begin("answer", ending(end), process, draws, context=context, want=want, on_end=noted)
            else:
                self._writes(ending, end, bought)
                signed.cut_in = None  # what waits is in the outbox
            return True

        world.after(draws.pick((0, 0, 1, 50, 2_000, 40_000)), reads)

    def _follows(self, bought: _Bought, receipt: Receipt, redirect: AnswerEnding) -> None:
        """Read a redirect, and go on to what it leads to, or not: the agent's own code may come between."""
        world, process, guard = self._world, bought.agent.process, bought.agent.process.guard
        draws = world.draws("follows", receipt.hold_id, receipt.presented, world.time.ms)
        redirect.is_followed = lambda: True

        def reads() -> bool:
            if guard is None or process.guard is not guard:
                return False
            process.run(lambda: note_answer(redirect, "whole"))
            if world.goes_wrong("cut", 0.1, draws):
                process.run(redirect.forgotten)
            else:
                world.after(draws.pick(_HOP_MS), follows)
            return True

        def follows() -> bool:
            if guard is None or process.guard is not guard:
                return False
            paid = replace(receipt, delivery=str(Delivery.OPEN))
            ending = AnswerEnding(bought.context, paid, guard.shell, success=True, broke=False)
            ending.redirect = redirect
            self._hops(bought, receipt, ending, draws)
            return True

        world.after(draws.pick(_HOP_MS), reads)

    def _hops(self, bought: _Bought, receipt: Receipt, ending: AnswerEnding, draws: Draws) -> None:
        """Send one hop: it brings the result, fails, or leads on."""
        world, process, guard = self._world, bought.agent.process, bought.agent.process.guard

        def arrives() -> bool:
            if process.guard is not guard:
                return False
            if world.goes_wrong("lost", 0.25, draws):
                process.run(ending.lost)
            elif world.goes_wrong("redirects", 0.2, draws):
                process.run(ending.waits)
                world.after(draws.pick(_HOP_MS), leads_on)
            else:
                end: AnswerEnd = "cut" if world.goes_wrong("cut", 0.12, draws) else "whole"
                self._ends(bought, receipt, ending, end, had=end == "whole")
            return True

        def leads_on() -> bool:
            if process.guard is guard:
                self._hops(bought, receipt, ending, draws)
            return process.guard is guard

        def begun(_value: None, error: BaseException | None) -> None:
            if isinstance(error, KeyboardInterrupt):
                process.run(ending.lost)
            else:
                world.after(draws.pick(_HOP_MS), arrives)

        flow, own = ending.following(), Draws(draws.bits64())
        self._tasks.begin("answer", flow, process, own, context=bought.context, want=bought.want, on_end=begun)

    def _writes(self, ending: AnswerEnding, end: AnswerEnd, bought: _Bought) -> None:
        """Write how a body ended, as its transport does in a ledger that may be away."""
        process, how = bought.agent.process, ""
        self._books.actor = Actor("answer", process, bought.context, bought.want, bought.generation)
        if self._world.goes_wrong("ledger", 0.02, bought.draws):
            how = bought.draws.pick(("before", "after"))
        with failing(process, how):
            process.run(lambda: note_answer(ending, end))

    # -- models -------------------------------------------------------------------------------------------------------

    def calls(self, agent: Agent, draws: Draws) -> None:
        """Call a model, streaming or not."""
        context, guard = self._context(agent), agent.process.guard
        meter = agent.session.meter if guard is not None else None
        if context is None or meter is None:
            return
        streams = draws.chance(0.4)
        ask = {
            "model": "sim-1",
            "messages": [{"role": "user", "content": f"hi {draws.below(40)}"}],
            "max_completion_tokens": 100,
        }
        body = json.dumps(ask | ({"stream": True} if streams else {})).encode()
        facts = RequestFacts(
            "POST", CHAT, "https://api.openai.com:443", "api.openai.com", True, False,  # noqa: FBT003
            hashlib.sha256(body).hexdigest(), draws.octets(32), body=body,
        )  # fmt: skip
        route = classify(meter, "POST", facts.host, CHAT)
        if not isinstance(route, Route):
            raise TypeError(f"{CHAT} is not metered: {route}")
        hold_id = hashlib.sha256(b"llm call" + facts.entropy).hexdigest()
        provider = Provider(self._world, streams, lambda nanos: self._books.billed.__setitem__(hold_id, nanos))
        self._world.counts.calls += 1

        def ended(value: object, _error: BaseException | None) -> None:
            if isinstance(value, InFlight):
                self._hears(agent, value, provider, draws, context)

        flow = metered_request(facts, route, Upload(body, ""), context, meter)
        self._tasks.begin("llm", flow, agent.process, draws, context=context, line=provider, on_end=ended)

    def _hears(self, agent: Agent, flight: InFlight, provider: Provider, draws: Draws, context: Context) -> None:
        """Read a model's answer: to its end, or part of it."""
        process, guard, world = agent.process, agent.process.guard, self._world
        broken = world.goes_wrong("cut", 0.2, draws)
        chunks = provider.chunks()
        for chunk in chunks[: 1 + draws.below(len(chunks))] if broken else chunks:
            flight.reader.feed(chunk)
        failed = broken and draws.chance(0.5)

        def over() -> bool:
            if process.guard is not guard:
                return False
            flow = end_call(flight, ended=not broken, failed=failed)

            def ended(receipt: Receipt | None, _error: BaseException | None) -> None:
                if receipt is not None and not receipt.in_doubt and not broken:
                    self._books.billed[receipt.hold_id] = provider.bill
                    self._books.check_hold(receipt.hold_id)

            self._tasks.begin("llm_end", flow, process, draws, context=context, on_end=ended)
            return True

        world.after(draws.pick((0, 5, 300, 20_000, 1_000_000)), over)

    # -- tools --------------------------------------------------------------------------------------------------------

    def uses_tool(self, agent: Agent, draws: Draws) -> None:
        """Use a tool: a fixed price at once, or a ceiling and its end later."""
        context = self._context(agent)
        if context is None:
            return
        amount = Nanos(draws.pick((10_000_000, 30_000_000, 50_000_000)))
        arguments = {"q": draws.below(30)}
        call = ToolCall(
            draws.pick(("serp", "ocr")), amount, draws.octets(32), arguments=arguments, shown=Readable(arguments),
            lifetime_s=draws.pick((60, 300, 900)),
        )  # fmt: skip
        self._world.counts.tools += 1
        if draws.chance(0.3):
            self._tasks.begin("tool", charge_tool(context, call), agent.process, draws, context=context)
            return

        def ended(held: HeldTool | None, _error: BaseException | None) -> None:
            if held is not None:
                self._runs(agent, held, draws, context)

        self._tasks.begin("tool", hold_tool(context, call), agent.process, draws, context=context, on_end=ended)

    def _runs(self, agent: Agent, held: HeldTool, draws: Draws, context: Context) -> None:
        process, guard = agent.process, agent.process.guard
        cost = draws.pick((held.ceiling, held.ceiling // 2, 2 * held.ceiling))
        void = draws.chance(0.2)
        end = ToolEnd(void="it did not run") if void else ToolEnd(amount=Nanos(cost))

        def over() -> bool:
            if process.guard is not guard:
                return False
            if not void:
                self._books.billed[held.hold.id] = min(cost, held.hold.amount)
            flow = end_tool(context, held.hold, end, ceiling=held.ceiling)

            def ended(receipt: Receipt | None, _error: BaseException | None) -> None:
                if receipt is not None and not receipt.in_doubt and not void:
                    self._books.billed[held.hold.id] = cost
                    self._books.check_hold(held.hold.id)

            self._tasks.begin("tool_end", flow, process, draws, context=context, on_end=ended)
            return True

        self._world.after(draws.pick((0, 5, 300, 20_000, 1_000_000)), over)

    # -- budgets ------------------------------------------------------------------------------------------------------

    def nests(self, agent: Agent, draws: Draws) -> None:
        """Open a child or a scope, and go on inside it."""
        budget, session = draws.pick(("$0.03", "$0.10", "$0.40")), agent.session
        if len(agent.process.agents) > _MOST_AGENTS:
            return
        try:
            if draws.chance(0.5):
                child = agent.run(lambda: session.child("child", budget=budget))
                agent.process.enter(child, child.__enter__, child.close, agent.context)
            else:
                # Not ``session.scope``: its generator would close the scope when the process that died is forgotten.
                scope = agent.run(lambda: session._nest(NodeKind.SCOPE, "scope", budget))  # noqa: SLF001
                agent.process.enter(scope, scope.__enter__, scope.close, agent.context)
        except (X402GuardError, ConfigError):
            return

    def leaves(self, agent: Agent) -> None:
        """End the session or scope of an agent."""
        try:
            agent.context.run(agent.leave)
        except X402GuardError:
            return

    def counts_tokens(self, agent: Agent, draws: Draws) -> None:
        """Reserve tokens of the context, and use or release them; all of it at once."""
        tokens = agent.session.tokens
        try:
            granted = agent.run(lambda: tokens.allocate(1 + draws.below(60_000), tool="ocr"))
            if draws.chance(0.5):
                agent.run(lambda: tokens.record_usage(draws.below(int(granted) + 1), granted))
            elif draws.chance(0.5):
                agent.run(lambda: tokens.release(granted))
        except X402GuardError:
            return

    def finalizes(self, agent: Agent, draws: Draws) -> None:
        """Make the last call of a session, which may use its reserve."""
        block = agent.session.finalizing()
        try:
            agent.run(block.__enter__)
        except X402GuardError:
            return
        self.calls(agent, draws)
        agent.context.run(block.__exit__, None, None, None)

    def goes_past(self, agent: Agent, draws: Draws) -> None:
        """Call a metered host by a library that no transport sees; ``install`` refuses it."""
        context = self._context(agent)
        if context is None:
            return

        def flow() -> Flow[None]:
            raise (
                yield from refused(
                    context, Refusal("unseen", "POST api.openai.com/v1/chat/completions goes by aiohttp")
                )
            )

        self._tasks.begin("refusal", flow(), agent.process, draws, context=context)


_MOST_AGENTS: Final = 12


@dataclass(eq=False)
class Provider:
    """The line of one call to a model. The provider bills what it says, and may say too much or nothing."""

    world: World
    streams: bool
    on_bill: Callable[[int], None]
    kind: str = ""
    completion: int = 0
    body: bytes = b""
    bill: int = 0

    def peek(self, effect: PeekBody) -> bytes | None:
        """See ``Line.peek``."""
        return self.body if len(self.body) <= effect.limit else None

    def send(self, task: Task[Any], _effect: Send) -> None:
        """See ``Line.send``."""
        world, draws = self.world, task.draws
        if world.goes_wrong("unsent", 0.03, draws):
            task.fail(ConnectionRefusedError("no connection"), before_connection=True)
            return
        self.kind = "answers" if world.calm else draws.weighted(_LLM)
        self.completion = 1 + draws.below(100)
        world.coverage.notes[f"model {self.kind}"] += 1
        effect = task.effect

        def answers() -> bool:
            if task.is_over or task.effect is not effect:
                return False
            self._answer(task)
            return True

        if self.kind in ("answers", "lost", "inflates"):
            # Until the answer has said more, the ceiling counts: 100 tokens of output.
            self.on_bill(8 * INPUT_NANOS + min(self.completion, 100) * OUTPUT_NANOS)
            self.completion = 3_000 if self.kind == "inflates" else self.completion
            self.bill = 8 * INPUT_NANOS + self.completion * OUTPUT_NANOS
        world.after(draws.pick((10, 300, 2_000)), answers)

    def _answer(self, task: Task[Any]) -> None:
        kinds = (("content-type", "text/event-stream" if self.streams else "application/json"),)
        match self.kind:
            case "lost":
                task.fail(ConnectionResetError("gone"), before_connection=False)
            case "limited":
                task.resume(Reply(429, kinds))
            case "fails":
                self.body = json.dumps({"error": {"message": SELLERS_WORDS}}).encode()
                task.resume(Reply(503, (("content-type", "application/json"),)))
            case "fails_silently":
                self.body = b""
                task.resume(Reply(503, kinds))
            case "asks_402":
                task.resume(Reply(402, kinds))
            case _:
                task.resume(Reply(200, kinds))

    def chunks(self) -> list[bytes]:
        """Return the answer's body in pieces."""
        used = {"prompt_tokens": 8, "completion_tokens": self.completion, "total_tokens": 8 + self.completion}
        usage = {} if self.kind == "says_nothing" else {"usage": used}
        plain = {"id": "c1", "object": "chat.completion", "created": 1, "model": "sim-1"}
        message = {"role": "assistant", "content": SELLERS_WORDS}
        if not self.streams:
            body = json.dumps(
                {**plain, "choices": [{"index": 0, "message": message, "finish_reason": "stop"}], **usage}
            ).encode()
            return [body[: len(body) // 2], body[len(body) // 2 :]]
        plain["object"] = "chat.completion.chunk"
        told = {**plain, "choices": [{"index": 0, "delta": message, "finish_reason": "stop"}]}
        parts = [told, {**plain, "choices": [], **usage}]
        return [*(f"data: {json.dumps(part)}\n\n".encode() for part in parts), b"data: [DONE]\n\n"]
