"""The pytest plugin: `pytest --perdure-certify shop.agents` adds a test for each tool of the module.

The first of them plays the schedules of all tools; the others read the same certificate. This module is imported in
each run of pytest, so it imports the rest when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from perdure.certify.certificate import Certificate

_OPTIONS = "perdure_certify"


class NotCertified(Exception):
    """What was found about a tool. The text is the report of the failed test."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("perdure", "certification of agents (perdure)")
    group.addoption(
        "--perdure-certify",
        dest=_OPTIONS,
        action="append",
        default=[],
        metavar="MODULE",
        help="kill workers at each boundary of this module's tools, and add a test for each tool; repeatable",
    )
    group.addoption(
        "--perdure-certify-lanes",
        dest=f"{_OPTIONS}_lanes",
        type=int,
        default=1,
        metavar="N",
        help="installations that play schedules at once (1)",
    )
    group.addoption(
        "--perdure-certify-tool-timeout",
        dest=f"{_OPTIONS}_tool_timeout",
        type=float,
        default=1.5,
        metavar="SECONDS",
        help="the time limit of a call in the certification (1.5)",
    )


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add a test for each tool of the modules that the option names."""
    for module in config.getoption(_OPTIONS):
        items.extend(_collect(session, module))


def _collect(session: pytest.Session, module: str) -> list[pytest.Item]:
    from perdure.certify import scenarios  # noqa: PLC0415 (see the module's docstring)
    from perdure.errors import SettingsError  # noqa: PLC0415 (the same)

    try:
        plan = scenarios.plan(*scenarios.load(module))
    except SettingsError as error:
        raise pytest.UsageError(f"--perdure-certify: {error}") from error
    certification: Any = _Certification.from_parent(session, name=module, nodeid=module)
    return [
        *(
            _ToolItem.from_parent(certification, name=f"{agent}::{tool}", key=(agent, tool))
            for agent, tool in plan.tools
        ),
        *(
            _LeftOut.from_parent(certification, name=f"{agent}::{tool}", reason=reason)
            for (agent, tool), reason in plan.left_out.items()
        ),
    ]


class _Certification(pytest.Collector):
    """The certification of one module."""

    _found: Certificate | None = None

    def collect(self) -> list[pytest.Item]:
        """Return nothing: the items are made with it."""
        return []

    def certificate(self) -> Certificate:
        """The certificate, made on first use."""
        from perdure.certify.run import certify  # noqa: PLC0415 (see the module's docstring)

        if self._found is None:
            self._found = certify(
                self.name,
                lanes=self.config.getoption(f"{_OPTIONS}_lanes"),
                tool_timeout_s=self.config.getoption(f"{_OPTIONS}_tool_timeout"),
            )
        return self._found


class _ToolItem(pytest.Item):
    """The test of one tool."""

    def __init__(self, *, key: tuple[str, str], **given: Any) -> None:
        super().__init__(**given)
        self._key = key

    def runtest(self) -> None:
        """Fail if a declaration of the tool is false."""
        certification = self.parent
        assert isinstance(certification, _Certification)  # noqa: S101 (made so in `_collect`)
        certificate = certification.certificate()
        report = next(each for each in certificate.tools if (each.agent, each.tool) == self._key)
        self.add_report_section("call", "perdure", "\n".join(report.notes))
        if found := certificate.findings_of(*self._key):
            raise NotCertified("\n\n".join(map(str, found)))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The findings without a traceback."""
        if isinstance(excinfo.value, NotCertified):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[str, int | None, str]:
        """The heading of a failed test."""
        return self.nodeid, None, f"certification of {self.name}"


class _LeftOut(pytest.Item):
    """A tool that cannot be certified: a skipped test."""

    def __init__(self, *, reason: str, **given: Any) -> None:
        super().__init__(**given)
        self._reason = reason

    def runtest(self) -> None:
        """Skip, with the reason."""
        pytest.skip(self._reason)
