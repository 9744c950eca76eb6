"""Renames a part of Keras for one process, as Keras's next release may do.

While Keras's modules are loaded, a finder changes their source: the name becomes ``NAME_moved``
wherever Keras has or uses it. So Keras itself works as before, and only what kerasdist spells is
gone. By the place where a declared internal is:

- a name with an underscore: the word, in all of Keras;
- a text that a function mentions: all texts that are this word;
- an attribute of objects: where their class is defined;
- another function or class of a module: what the module binds to this name, its uses in the module,
  in imports from it, and as its attribute; for a method without an underscore, its class;
- a module: its path.

A framework's own code cannot be changed so: much of it is in C, and frameworks ask themselves for
these names. There the declaration asks for a name that the framework has not (`ask_for_another`),
which is the same for kerasdist as long as it takes internals by its tables alone; this
`tests/unit/test_internals.py` sees to.
"""

import ast
import importlib.util
import linecache
import os
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

MOVED = "_moved"


def rename_in_keras(paths: Iterable[str]):
    """Gives other names to what is at some paths of Keras, before it is imported."""
    assert "keras" not in sys.modules, "Keras has been imported"
    sys.meta_path.insert(0, _Finder([rule_of(path) for path in paths]))


def ask_for_another(paths: Iterable[str]):
    """Lets those declarations that name some path ask for others, which no framework has."""
    from kerasdist.core.internals import Internal

    gone, init = {*paths}, Internal.__init__

    def declare(self, spellings, *arguments, **options):
        if gone & {*spellings}:
            spellings = {f"{path}{MOVED}": versions for path, versions in spellings.items()}
        init(self, spellings, *arguments, **options)

    Internal.__init__ = declare


def folder_of_keras() -> Path:
    """Where the modules of Keras are; nothing is imported."""
    return Path(importlib.util.find_spec("keras").submodule_search_locations[0])


def rule_of(path: str) -> "_Rule":
    """How Keras's source changes for what is at a path."""
    module, _, names = path.partition(":")
    parts = names.split(".") if names else []
    asked = module
    while parts and (inside := _module_inside(module, parts)):
        module, asked = inside, f"{asked}.{parts.pop(0)}"
    if not parts:
        return _Module(module)
    name = parts[-1]
    if name.startswith("_") and not name.startswith("__"):
        return _Word(name, rf"\b{name}\b")
    if len(parts) > 2 or (len(parts) == 2 and _is_text(module, *parts)):
        return _Word(name, rf"(?<=['\"]){name}(?=['\"])")
    if len(parts) == 2 and (kind := _class_with(*parts)):
        return kind
    # Many classes have a method of a name that is not private: its class moves.
    return _OfModule(parts[0], module, asked)


def _module_inside(module: str, parts: Sequence[str]) -> str | None:
    """The module that the first part of a name is; those of a backend are found one higher, too."""
    inside = [f"{module}.{parts[0]}"]
    if len(parts) > 1:
        inside.append(f"{module}.{os.environ['KERAS_BACKEND']}.{parts[0]}")
    return next(filter(_is_module, inside), None)


def _is_text(module: str, owner: str, name: str) -> bool:
    """Whether a name is a text that a function of a module mentions."""
    place = _place(module)
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return any(
        isinstance(node, ast.FunctionDef) and node.name == owner and not name.startswith("__")
        for node in ast.parse(file.read_text("utf-8")).body
    )


def _class_with(owner: str, name: str) -> "_Attribute | None":
    """The rule for an attribute without an underscore that objects of a class get."""
    for file in (folder_of_keras() / "src").rglob("*.py"):
        text = file.read_text("utf-8")
        if _Attribute.is_of(owner, text) and re.search(rf"\bself\.{name} =", text):
            return _Attribute(owner, name)
    return None


def _place(module: str) -> Path:
    return folder_of_keras().parent.joinpath(*module.split("."))


def _is_module(path: str) -> bool:
    return _place(path).is_dir() or _place(path).with_suffix(".py").exists()


class _Word:
    """A word that becomes another wherever a pattern finds it."""

    def __init__(self, word: str, pattern: str):
        self.word = word
        self._pattern = re.compile(pattern)

    def change(self, module: str, text: str) -> str:
        del module
        return self._pattern.sub(self.word + MOVED, text)


class _Attribute:
    """An attribute of a class's objects, where the class is defined."""

    def __init__(self, owner: str, word: str):
        self.word = word
        self._owner = owner

    @staticmethod
    def is_of(owner: str, text: str) -> bool:
        return re.search(rf"^class {owner}\b", text, re.M) is not None

    def change(self, module: str, text: str) -> str:
        del module
        if not self.is_of(self._owner, text):
            return text
        return re.sub(rf"\bself\.{self.word}\b", f"self.{self.word}{MOVED}", text)


class _Module:
    """A module that lies elsewhere, with all that is below it."""

    def __init__(self, path: str):
        self.path = path
        self.package, _, self.word = path.rpartition(".")

    def change(self, module: str, text: str) -> str:
        text = re.sub(rf"\b{re.escape(self.path)}\b", self.path + MOVED, text)
        text = _Imports(self.word, self.package).apply(text)
        # What its package imports from itself would be an attribute of this name again.
        return _Definition(self.word).apply(text) if module == self.package else text

    def is_gone(self, name: str) -> bool:
        return name == self.path or name.startswith(f"{self.path}.")

    def real(self, name: str) -> str:
        """The module's own name, for the one that it has now."""
        now = self.path + MOVED
        inside = name == now or name.startswith(f"{now}.")
        return self.path + name.removeprefix(now) if inside else name


class _OfModule:
    """A function, class or variable that a module has under another name."""

    def __init__(self, word: str, module: str, alias: str):
        self.word = word
        self._module = module
        self._alias = alias

    def change(self, module: str, text: str) -> str:
        if module == self._module:
            return _Definition(self.word, may_come_with_a_star=True).apply(text)
        return _Imports(self.word, self._module, self._alias).apply(text)


class _Imports(ast.NodeTransformer):
    """Imports from a module, and reads of its attribute, by the other name."""

    def __init__(self, word: str, *modules: str):
        self._word = word
        self._modules = modules
        self._names = {*modules}  # of the modules, in a file

    def apply(self, text: str) -> str:
        tree = ast.parse(text)
        for node in ast.walk(tree):
            match node:
                case ast.Import(names=names):
                    bound = {a.asname: a.name for a in names if a.asname}
                case ast.ImportFrom(module=package, names=names):
                    bound = {a.asname or a.name: f"{package}.{a.name}" for a in names}
                case _:
                    continue
            self._names |= {
                name + module.removeprefix(path)
                for name, path in bound.items()
                for module in self._modules
                if f"{module}.".startswith(f"{path}.")
            }
        before = ast.dump(tree)
        after = self.visit(tree)
        return text if ast.dump(after) == before else ast.unparse(ast.fix_missing_locations(after))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | list[ast.AST]:
        if node.module not in self._modules:
            return node
        again = ast.ImportFrom(node.module, [ast.alias(self._word + MOVED, self._word)], 0)
        if any(alias.name == "*" for alias in node.names):
            return [node, again]
        for alias in node.names:
            if alias.name == self._word:
                alias.name, alias.asname = self._word + MOVED, alias.asname or self._word
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr == self._word and ast.unparse(node.value) in self._names:
            node.attr += MOVED
        return node


class _Definition(ast.NodeTransformer):
    """What a module binds to a name, and its uses in functions that have no such local name."""

    def __init__(self, word: str, *, may_come_with_a_star: bool = False):
        self._word = word
        self._may_come_with_a_star = may_come_with_a_star
        self._is_hidden = [False]  # by a local name, in each function around
        self._is_bound = False

    def apply(self, text: str) -> str:
        tree = self.visit(ast.parse(text))
        if not self._is_bound:
            if not self._may_come_with_a_star:
                return text
            tree.body += ast.parse(f"{self._word}{MOVED} = {self._word}; del {self._word}").body
        return ast.unparse(ast.fix_missing_locations(tree))

    @property
    def _is_at_the_top(self) -> bool:
        return len(self._is_hidden) == 1

    def _definition(self, node):
        if node.name == self._word and self._is_at_the_top:
            node.name += MOVED
            self._is_bound = True
        is_class = isinstance(node, ast.ClassDef)
        head = [*node.bases, *node.keywords] if is_class else [node.args, node.returns]
        for one in filter(None, [*node.decorator_list, *head]):
            self.visit(one)
        self._is_hidden.append(not is_class and self._word in _local_names(node))
        node.body = [self.visit(one) for one in node.body]
        self._is_hidden.pop()
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _definition

    def visit_Global(self, node: ast.Global) -> ast.AST:
        node.names = [one + MOVED * (one == self._word) for one in node.names]
        return node

    def visit_alias(self, node: ast.alias) -> ast.AST:
        if self._is_at_the_top and (node.asname or node.name) == self._word:
            node.asname = self._word + MOVED
            self._is_bound = True
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id == self._word and not any(self._is_hidden):
            if isinstance(node.ctx, ast.Store) and self._is_at_the_top:
                self._is_bound = True
            node.id += MOVED
        return node


def _local_names(function: ast.FunctionDef) -> set[str]:
    found, not_local = set(), set()
    for node in ast.walk(function):
        match node:
            case ast.arg():
                found.add(node.arg)
            case ast.Name(ctx=ast.Store()):
                found.add(node.id)
            case ast.alias():
                found.add(node.asname or node.name)
            case ast.Global(names=names):
                not_local |= {*names}
    return found - not_local


_Rule = _Word | _Attribute | _OfModule | _Module


class _Finder(MetaPathFinder):
    """Loads modules of Keras; those that have what is renamed, from other source."""

    def __init__(self, rules: Sequence[_Rule]):
        self._rules = rules
        self._modules = [rule for rule in rules if isinstance(rule, _Module)]

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del target
        if name.partition(".")[0] != "keras":
            return None
        if any(one.is_gone(name) for one in self._modules):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        real = name
        for one in self._modules:
            real = one.real(real)
        spec = PathFinder.find_spec(real, path)
        if spec is None or spec.origin is None:
            return spec
        text = Path(spec.origin).read_text("utf-8")
        changed = text
        for rule in self._rules:
            if rule.word in changed or "import *" in changed:
                changed = rule.change(real, changed)
        if changed == text and real == name:
            return spec
        loader = _Loader(name, spec.origin, changed)
        folders = spec.submodule_search_locations
        return importlib.util.spec_from_file_location(
            name, spec.origin, loader=loader, submodule_search_locations=folders
        )


class _Loader(SourceFileLoader):
    """Compiles changed source; what is compiled is not kept."""

    def __init__(self, name: str, path: str, text: str):
        super().__init__(name, path)
        self._text = text

    def get_code(self, fullname: str) -> CodeType:
        # TensorFlow reads functions' source to convert it.
        lines = self._text.splitlines(keepends=True)
        linecache.cache[self.path] = (len(self._text), None, lines, self.path)
        return compile(self._text, self.path, "exec", dont_inherit=True)

    def get_source(self, fullname: str) -> str:
        return self._text
