"""The descriptions that a model receives are parsed from a tool's docstring, in each of the common styles."""

from __future__ import annotations

import pytest

from perdure import tool
from perdure.tools.docstring import describe

GOOGLE = """Transfer money.

    Only within the euro area.

    Args:
        iban (str): The receiver's account,
            without spaces.
        cents: How much: in euro cents.
        **options: More.
        silent:

    Note:
        For people.

    Returns:
        The receipt.
    """

SPHINX = """Transfer money.

    Only within the euro area.

    :param str iban: The receiver's account,
        without spaces.
    :param cents: How much: in euro cents.
    :type cents: int
    :param options: More.
    :returns: The receipt.
    :raises ValueError: never
    """

NUMPY = """Transfer money.

    Only within the euro area.

    Parameters
    ----------
    iban : str
        The receiver's account,
        without spaces.
    cents : int, optional
        How much: in euro cents.
    **options
        More.

    Returns
    -------
    str
        The receipt.

    Notes
    -----
    For people.
    """

ARGUMENTS = {"iban": "The receiver's account, without spaces.", "cents": "How much: in euro cents.", "options": "More."}


@pytest.mark.parametrize("text", [GOOGLE, SPHINX, NUMPY], ids=["Google", "Sphinx", "NumPy"])
def test_each_style_describes_the_tool_and_its_parameters(text: str) -> None:
    """Google, Sphinx and NumPy styles give the same description and parameters. Other sections are left out."""
    assert describe(text) == ("Transfer money.\n\nOnly within the euro area.", ARGUMENTS)


def test_a_numpy_entry_may_describe_several_parameters() -> None:
    """The NumPy entry `x, y : float` describes two parameters."""
    text = "Move.\n\nParameters\n----------\nx, y : float\n    In metres.\n"
    assert describe(text).arguments == {"x": "In metres.", "y": "In metres."}


@pytest.mark.parametrize(
    "text",
    [
        "One line",
        "Note: this is a sentence.\n\nUse it with: care.",
        "Send a smile.\n\n:) is one, :( is none.",
        "Two lines\nof one sentence: no section.",
        "Do it.\n\nSteps:\n  1. open\n  2. close",
    ],
)
def test_a_docstring_without_sections_is_the_description(text: str) -> None:
    """Colons in prose do not start a section."""
    assert describe(text) == (text, {})


@pytest.mark.parametrize("notes", ["Note:\n    For people.", "Notes\n-----\nFor people."], ids=["Google", "NumPy"])
def test_notes_are_left_out_without_parameters(notes: str) -> None:
    """Notes are left out even if the docstring describes no parameters."""
    assert describe(f"Say the time.\n\n{notes}") == ("Say the time.", {})


@pytest.mark.parametrize("text", [None, "", " \n "])
def test_an_empty_docstring_describes_nothing(text: str | None) -> None:
    """An empty or missing docstring gives an empty description."""
    assert describe(text) == ("", {})


def test_the_model_sees_the_descriptions() -> None:
    """The model gets the descriptions of the tool and its parameters."""

    @tool(effect="pure")
    def scale(factor: float) -> float:
        """Scale the picture.

        :param factor: Above 1 enlarges.
        """
        return factor

    assert scale.description == "Scale the picture."
    assert scale.parameters["properties"]["factor"]["description"] == "Above 1 enlarges."
