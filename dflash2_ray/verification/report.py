"""The result of `dflash2-ray verify`: one page for people, one object for programs."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from dflash2_ray.verification.backend import Facts
from dflash2_ray.verification.identity import Identity
from dflash2_ray.verification.law import ALPHA, LawTest
from dflash2_ray.verification.option_check import OptionReport

MAX_SHOWN = 3  # counter-examples per row


@dataclass(frozen=True)
class Report:
    """What was found; a check that was not asked for is None. num_left_out: prompts without room for an answer."""

    facts: Facts
    num_prompts: int
    num_left_out: int
    max_tokens: int
    company: int
    seconds: float
    identity: Identity | None = None
    laws: tuple[LawTest, ...] | None = None
    options: OptionReport | None = None

    @property
    def passed(self) -> bool:
        return not self.reasons

    @property
    def reasons(self) -> list[str]:
        """Why it failed."""
        reasons = []
        if self.identity is not None:
            worst = max((apart.margin for run in self.identity.runs for apart in run.differences), default=0.0)
            if worst > self.identity.bound:
                reasons.append(
                    f"a greedy text differs where the plain margin is {worst:.3g}; the bound is {self.identity.bound:g}"
                )
            if any(run.num_refused for run in self.identity.runs):
                reasons.append("greedy requests were refused")
            if any(run.speculative and not run.num_accepted for run in self.identity.runs):
                reasons.append("no draft was accepted in greedy decoding, so nothing was proven")
        for law in self.laws or ():
            if law.refused is not None:
                reasons.append(f"the law `{law.name}` was refused ({law.refused})")
            elif not law.num_accepted or not law.run:
                what = "no draft was accepted" if not law.num_accepted else "nothing varied"
                reasons.append(f"the law `{law.name}`: {what}, so nothing was proven")
            elif not law.passed:
                reasons.append(f"the law `{law.name}` is not that of plain decoding (corrected p {law.p_value:.2g})")
        if self.options is not None:
            failed = [one.name for one in self.options.sets if not one.passed]
            if failed:
                reasons.append(f"answers differ under {', '.join(failed)}")
            if not self.options.num_accepted:
                reasons.append("no draft was accepted under any option, so nothing was proven")
        return reasons

    @property
    def hint(self) -> str:
        """What may help when nothing was drafted; empty otherwise."""
        if self.facts.draft_width != "fixed" and any("no draft" in reason for reason in self.reasons):
            return f"the draft width follows the load (draft_width={self.facts.draft_width}): serve with draft_width=fixed, or verify at a lower --concurrency"
        return ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "reasons": self.reasons,
            "facts": asdict(self.facts),
            "num_prompts": self.num_prompts,
            "num_prompts_left_out": self.num_left_out,
            "max_tokens": self.max_tokens,
            "company": self.company,
            "seconds": round(self.seconds, 1),
            "identity": None if self.identity is None else self.identity.as_dict(),
            "laws": None if self.laws is None else [law.as_dict() for law in self.laws],
            "options": None if self.options is None else self.options.as_dict(),
        }

    def lines(self) -> Iterator[str]:
        """The page, in rich's markup-free text; a row begins with `pass`, `FAIL` or `none`."""
        facts, out = self.facts, self.num_left_out
        yield f"{facts.model} ({facts.dtype}, {facts.device}) with {facts.drafter}, {facts.num_speculative_tokens} drafts a step, {facts.where}"
        left_out = f"; {out} left out: no room for an answer" if out else ""
        yield f"{self.num_prompts} prompts{left_out}; {self.max_tokens} tokens per answer; company: {self.company} requests in flight"
        if self.identity is not None:
            yield from self._identity_lines(self.identity)
        if self.laws is not None:
            yield from self._law_lines(self.laws)
        if self.options is not None:
            yield from self._option_lines(self.options)
        yield ""
        yield f"{'passed' if self.passed else 'failed: ' + '; '.join(self.reasons)} ({self.seconds:.0f} s)"
        if self.hint:
            yield f"hint: {self.hint}"

    def _identity_lines(self, identity: Identity) -> Iterator[str]:
        yield ""
        yield "Greedy identity: each text against plain decoding, alone"
        for run in identity.runs:
            accepted = f"{run.num_accepted:,} drafts accepted" if run.speculative else ""
            yield _row(
                run.passed(identity.bound), run.name, f"{run.num_equal} of {run.num_texts} texts equal", accepted
            )
            for one in run.differences[:MAX_SHOWN]:
                yield f"       prompt {one.prompt}, token {one.position}: plain {one.plain}, got {one.got}, plain margin {one.margin:.2g} (a tie up to {identity.bound:g})"

    def _law_lines(self, laws: tuple[LawTest, ...]) -> Iterator[str]:
        yield ""
        yield f"Sampling law: unseeded draws against plain ones, chi-square; right laws fail with probability {ALPHA:g}"
        for law in laws:
            if not law.run:
                yield _row(False, law.name, law.refused or "nothing varied", f"{law.num_accepted:,} drafts accepted")
                continue
            tests = law.run.values()
            size = f"{law.num_prompts} prompts x {law.num_samples} draws a side"
            yield _row(law.passed, law.name, f"p {law.p_value:.2g}, {size}", f"{law.num_accepted:,} drafts accepted")
            shifts = sorted(test.detectable(law.alpha) for test in tests)
            powers = sorted(test.power(0.1, law.alpha) for test in tests)
            yield (
                f"       {len(law.run)} tests (p is corrected for {law.num_corrected}), {sum(test.degrees for test in tests)} degrees of freedom; 90 % power against a shift of "
                f"{_percent(shifts[0])} to {_percent(shifts[-1])}; power against 10 %: {powers[0]:.2f} to {powers[-1]:.2f}"
            )

    def _option_lines(self, report: OptionReport) -> Iterator[str]:
        yield ""
        yield "Options: greedy and seeded, speculation on = off, stream = whole (text, tokens, finish, usage, log-probabilities)"
        for one in report.sets:
            if one.refused is not None:
                yield f"  {'none' if one.passed else 'FAIL'} {one.name:<28} refused ({one.refused[:90]})"
            else:
                notes = f"; {', '.join(one.notes)}" if one.notes else ""
                yield _row(
                    one.passed, one.name, f"{one.num_texts} texts", f"{one.num_accepted:,} drafts accepted{notes}"
                )
            for found in (one.differences + one.rounding)[:MAX_SHOWN]:
                yield f"       {found}"
        if report.plain_texts:
            yield f"       rounding: {report.plain_differences} of {report.plain_texts} plain texts differ between alone and in company"


def _row(passed: bool, name: str, what: str, rest: str) -> str:
    return f"  {'pass' if passed else 'FAIL'} {name:<28} {what}{', ' + rest if rest else ''}"


def _percent(shift: float) -> str:
    return "more than 100 %" if shift > 1 else f"{100 * shift:.0f} %"
