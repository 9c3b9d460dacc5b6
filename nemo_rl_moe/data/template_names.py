# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Names of the variables that a chat template reads, and the values that it distinguishes."""

from nemo_rl_moe.errors import DataError


def names_read(template: str) -> dict[str, tuple[str, ...]]:
    """Return, in sorted order, name of a variable that a template reads -> texts with which the template compares
    it."""
    from jinja2 import Environment, meta, nodes
    from jinja2.exceptions import TemplateSyntaxError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser

    class GenerationTag(Extension):
        tags = {"generation"}  # noqa: RUF012  (declared so by the base class)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = Environment(extensions=[GenerationTag, loopcontrols])
    try:
        tree = environment.parse(template)
        compared: dict[str, list[str]] = {}
        for comparison in tree.find_all(nodes.Compare):
            if isinstance(comparison.expr, nodes.Name):
                constants = (each for part in comparison.ops for each in part.find_all(nodes.Const))
                texts = [each.value for each in constants if isinstance(each.value, str)]
                compared.setdefault(comparison.expr.name, []).extend(texts)
        # Called last, because it folds constants in the tree.
        names = sorted(meta.find_undeclared_variables(tree))
    except TemplateSyntaxError as error:
        raise DataError(f"the chat template is not valid Jinja: line {error.lineno}: {error.message}") from None
    except RecursionError:
        raise DataError("the chat template is not valid Jinja: brackets or blocks are nested too deeply") from None
    return {name: tuple(dict.fromkeys(compared.get(name, ()))) for name in names}
