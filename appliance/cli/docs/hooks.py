"""The documentation of the hooks, written from their specifications: docs/hooks.md.

The hook says what it is asked and when; the views say what is shown and answered; what
makes an answer valid at its check, an example among the examples: each said in one place.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from types import ModuleType

from appliance import plugins, vocabulary
from appliance.cli.docs.hook_examples import Examples
from appliance.errors import PolicyError
from appliance.hookspecs import API_VERSION, ENTRY_POINTS, HOOKS, PolicySpec
from appliance.policies import validation
from appliance.scheduling import policy_api
from appliance.vocabulary import Word

LONGEST_EXAMPLE = 8
"""Lines of code, without the docstring."""

LONGEST_LINE = 100

_WORD = re.compile(r"[A-Z]\w+")

_INTRODUCTION = """\
# Hooks

Generated from the specifications by `make generate`; version {version} of the hooks.
A policy of one's own, step by step: [writing-a-policy.md](writing-a-policy.md).

A *hook* is a question that the scheduling machine asks. A policy is a `msgspec.Struct` whose fields
are its parameters, named by an entry point of the group `{group}`. It answers the
questions for which it has a method marked with `appliance.hookspecs.hookimpl`. Such a method

- may leave out arguments that it does not need;
- gets frozen views, which it cannot change, and keeps none of them longer than the question: what
  it remembers is in attributes that `__post_init__` makes, apart from its parameters;
- gets the time as `now`, seconds on the machine's clock, as are all times in views and answers. It
  is steady and its zero means nothing. The time of day and the date are in `clock`, a
  [`LocalClock`](#localclock);
- returns an answer, or `None` to leave the question to the next policy;
- decides by its arguments and what it remembers, not by clocks, dice without a seed, files or the
  order of sets: a journal is replayed by asking it again.

An answer that is not valid, an exception or silence costs the policy that question: the next policy
is asked, at last the built-in, and the fault is reported with the policy's name.

## Questions
"""

_WORDS = """\
They are in `appliance.scheduling.policy_api`, some in `appliance.vocabulary`. All are frozen."""


class Shipped(Word, frozen=True):
    """A shipped policy's implementation of a hook: which policy, in which file, what it does."""

    policy: str
    path: str
    about: str


class HookDoc(Word, frozen=True):
    """Everything there is to say about a hook. `views` and `answers` are names of words."""

    name: str
    signature: str
    asked: str
    views: tuple[str, ...]
    answers: tuple[str, ...]
    returns: str
    valid: str
    example_about: str
    example: str
    shipped: tuple[Shipped, ...]


def hook_docs() -> list[HookDoc]:
    """Of every hook. Raises `PolicyError` naming the hook and the part that is missing."""
    shipped = list(shipped_policies())
    return [_hook_doc(hook, shipped) for hook in HOOKS]


def generate() -> str:
    """The text of ``docs/hooks.md``."""
    docs = hook_docs()
    lines = [_INTRODUCTION.format(version=API_VERSION, group=ENTRY_POINTS)]
    for doc in docs:
        lines += [*_hook_section(doc), ""]
    used = _closure({name for doc in docs for name in (*doc.views, *doc.answers)})
    lines += ["## Views and answers", "", _WORDS, ""]
    for name in used:
        lines += [*_word_section(name), ""]
    return "\n".join(lines).rstrip() + "\n"


# --- a hook --------------------------------------------------------------------------------------


def _hook_doc(hook: str, shipped: list[tuple[str, str, type]]) -> HookDoc:
    spec = getattr(PolicySpec, hook)
    parameters = list(inspect.signature(spec).parameters.values())[1:]
    returns = str(inspect.signature(spec).return_annotation)
    arguments = [f"{p.name}: {p.annotation}" for p in parameters]
    example_about, example = _example(hook)
    doc = HookDoc(
        name=hook,
        signature=_signature(hook, arguments, returns),
        asked=_prose(spec.__doc__),
        views=_words(" ".join(str(p.annotation) for p in parameters)),
        answers=_words(returns),
        returns=returns.removesuffix(" | None"),
        valid=_prose(getattr(validation, hook).__doc__),
        example_about=example_about,
        example=example,
        shipped=tuple(
            Shipped(policy=name, path=path, about=_paragraph(getattr(kind, hook).__doc__))
            for name, path, kind in shipped
            if hasattr(kind, hook)
        ),
    )
    for part in doc.__struct_fields__:
        # A decision may be answered by a word of the language, such as a number.
        if not getattr(doc, part) and part != "answers":
            raise PolicyError(f"docs/hooks.md: hook {hook} has no {part}")
    return doc


def _signature(hook: str, arguments: list[str], returns: str) -> str:
    line = f"def {hook}(self, {', '.join(arguments)}) -> {returns}"
    if len(line) <= LONGEST_LINE:
        return line
    return "\n".join(
        [f"def {hook}(", "    self,", *[f"    {a}," for a in arguments], f") -> {returns}"]
    )


def _example(hook: str) -> tuple[str, str]:
    """What the example does, and its code without that."""
    method = getattr(Examples, hook)
    source = textwrap.dedent(inspect.getsource(method))
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    lines = source.splitlines()
    docstring = function.body[0]
    kept = lines[: docstring.lineno - 1] + lines[(docstring.end_lineno or 0) :]
    if len(kept) > LONGEST_EXAMPLE:
        raise PolicyError(f"docs/hooks.md: the example of {hook} has {len(kept)} lines")
    return _prose(method.__doc__), "\n".join(kept)


def shipped_policies() -> Iterator[tuple[str, str, type]]:
    """The policies of `appliance.plugins`: name, file, class."""
    for info in sorted(pkgutil.iter_modules(plugins.__path__), key=lambda info: info.name):
        module = importlib.import_module(f"{plugins.__name__}.{info.name}")
        for kind in vars(module).values():
            if _is_policy(kind) and kind.__module__ == module.__name__:
                yield info.name, f"../appliance/plugins/{info.name}.py", kind


def _is_policy(kind: object) -> bool:
    return isinstance(kind, type) and any(
        hasattr(getattr(kind, hook, None), "appliance_impl") for hook in HOOKS
    )


def _hook_section(doc: HookDoc) -> list[str]:
    shown = ", ".join(_link(name) for name in doc.views)
    answered = ", ".join(_link(name) for name in doc.answers) or f"`{doc.returns}`"
    if doc.returns not in doc.answers and doc.answers:
        answered = f"`{doc.returns}` of {answered}"
    lines = [
        f"### {doc.name}",
        "",
        "```python",
        doc.signature,
        "```",
        "",
        f"**Asked.** {doc.asked}",
        "",
        f"**Shown.** {shown}",
        "",
        f"**Answer.** {answered}. Valid: {_lowered(doc.valid)}",
        "",
        f"**Example.** {doc.example_about}",
        "",
        "```python",
        doc.example,
        "```",
        "",
        "**Shipped.**",
        "",
    ]
    for one in doc.shipped:
        about = f": {_lowered(one.about)}" if one.about else ""
        lines.append(f"- [`{one.policy}`]({one.path}){about}")
    return [
        *lines,
        "",
        f"**Conformance.** `appliance policy test` puts questions of `{doc.name}` that the machine"
        " asked, checks every answer with"
        f" [`validation.{doc.name}`](../appliance/policies/validation.py)"
        " and measures how long it took.",
    ]


# --- words ---------------------------------------------------------------------------------------


def _words(annotation: str) -> tuple[str, ...]:
    """The words of ours that an annotation names."""
    return tuple(dict.fromkeys(name for name in _WORD.findall(annotation) if _definition(name)))


def _closure(names: set[str]) -> list[str]:
    """These words and those their fields are made of, in the order of their definition."""
    todo, known = list(names), set(names)
    while todo:
        for name in _words(" ".join(kind for _, kind, _ in _fields(todo.pop()))):
            if name not in known:
                known.add(name)
                todo.append(name)
    order = [*_definitions(policy_api), *_definitions(vocabulary)]
    return sorted(known, key=order.index)


def _word_section(name: str) -> list[str]:
    definition = _definition(name)
    lines = [f"### {_title(name)}", ""]
    if isinstance(definition, ast.AnnAssign):
        value = "" if definition.value is None else ast.unparse(definition.value)
        return [*lines, f"`{value}`: {_lowered(_assigned_docs(policy_api)[name])}"]
    assert isinstance(definition, ast.ClassDef), f"{name} is defined as a class or an alias"
    lines += [_docstring(definition)] if ast.get_docstring(definition) else []
    notes = []
    if fields := _fields(name):
        lines += ["", "```python", f"class {name}:"]
        lines += [f"    {field}: {kind}" for field, kind, _ in fields]
        lines += ["```"]
        notes = [f"- `{field}`: {_lowered(about)}" for field, _, about in fields if about]
    members = [f"`{name}.{target.id}`" for target in _members(definition)]
    if members:
        lines += ["", f"One of {', '.join(members)}."]
    methods = [node for node in definition.body if isinstance(node, ast.FunctionDef)]
    notes += [f"- `{_call(node)}`: {_lowered(_docstring(node))}" for node in methods]
    return [*lines, "", *notes] if notes else lines


def _members(definition: ast.ClassDef) -> list[ast.Name]:
    """Those of an enumeration."""
    return [
        target
        for node in definition.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]


def _call(method: ast.FunctionDef) -> str:
    """A method or property, and what comes back."""
    returned = "" if method.returns is None else f" -> {ast.unparse(method.returns)}"
    if any(ast.unparse(decorator) == "property" for decorator in method.decorator_list):
        return method.name + returned
    arguments = ast.unparse(method.args).removeprefix("self").removeprefix(", ")
    return f"{method.name}({arguments}){returned}"


def _docstring(node: ast.ClassDef | ast.FunctionDef) -> str:
    return _prose(ast.get_docstring(node))


def _fields(name: str) -> list[tuple[str, str, str]]:
    """Name, type with any default, and what is said of it alone, of each field of a word."""
    definition = _definition(name)
    if not isinstance(definition, ast.ClassDef):
        value = definition.value if isinstance(definition, ast.AnnAssign) else None
        return [("", "" if value is None else ast.unparse(value), "")]
    docs = _docs_of(definition.body)
    return [
        (field, _typed(node), docs.get(field, ""))
        for node in definition.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        for field in [node.target.id]
    ]


def _typed(field: ast.AnnAssign) -> str:
    default = "" if field.value is None else f" = {ast.unparse(field.value)}"
    return ast.unparse(field.annotation) + default


@cache
def _definitions(module: ModuleType) -> dict[str, ast.stmt]:
    """What a module of words defines, by name: classes, and aliases that are explained."""
    body = ast.parse(inspect.getsource(module)).body
    aliases = _docs_of(body)
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.target) in aliases:
            found[ast.unparse(node.target)] = node
    return found


def _definition(name: str) -> ast.stmt | None:
    return _definitions(policy_api).get(name) or _definitions(vocabulary).get(name)


def _assigned_docs(module: ModuleType) -> dict[str, str]:
    return _docs_of(ast.parse(inspect.getsource(module)).body)


def _docs_of(body: list[ast.stmt]) -> dict[str, str]:
    """The strings that follow annotated names."""
    return {
        ast.unparse(node.target): _prose(after.value.value)
        for node, after in pairwise(body)
        if isinstance(node, ast.AnnAssign)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
        and isinstance(after.value.value, str)
    }


# --- text ----------------------------------------------------------------------------------------


def _prose(docstring: str | None) -> str:
    """A docstring as one paragraph for each of its own."""
    paragraphs = inspect.cleandoc(docstring or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _paragraph(docstring: str | None) -> str:
    return _prose(docstring).split("\n\n")[0]


def _lowered(text: str) -> str:
    """As the rest of a sentence; names and abbreviations keep their capitals."""
    word = text.split(" ", 1)[0]
    keeps = word[1:] != word[1:].lower() or word.endswith(".")
    return text if keeps else text[:1].lower() + text[1:]


def _title(name: str) -> str:
    """The heading of a view or an answer, which is not that of a hook in other letters."""
    return f"{name} (answer)" if name.lower() in HOOKS else name


def _link(name: str) -> str:
    fragment = re.sub(r"[^\w -]", "", _title(name).lower()).replace(" ", "-")
    return f"[`{name}`](#{fragment})"
