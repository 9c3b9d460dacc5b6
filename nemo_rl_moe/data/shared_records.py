# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Records of several environments in one data set. Each record names its environment."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from nemo_rl_moe.config.suggestions import did_you_mean, nearest, shortened
from nemo_rl_moe.data.prompt_records import PromptRecord
from nemo_rl_moe.data.record_values import value_at
from nemo_rl_moe.data.records import BadLine
from nemo_rl_moe.errors import DataError

KEY, MIXTURE_KEY = "data.environment_key", "env.mixture"


@dataclass
class SharedRecords:
    """Finds each environment's records in a data set that several environments share. The data set is read once for
    each environment.

    `key` is the key of a record that holds the name of its environment, and `names` are the run's environments.
    """

    key: str
    names: Sequence[str]
    _found: set[str] = field(default_factory=set)
    _reported: set[str] = field(default_factory=set)

    def lack(self, name: str) -> bool:
        """Return whether the data has no record of the environment `name`, and no bad line that may be such a
        record."""
        return name not in self._found and not self._reported

    def parser(
        self, name: str, parse: Callable[[object, str], PromptRecord]
    ) -> Callable[[object, str], PromptRecord | None]:
        """Return a function that parses the records of the environment `name`. It returns None for records of other
        environments.

        The function raises `DataError` for an environment that the run does not have. Otherwise a typo in a name would
        silently drop the environment's prompts.
        """

        def parse_own(record: object, sample_id: str) -> PromptRecord | None:
            found = value_at(record, self.key, KEY) if isinstance(record, Mapping) else name
            if found == name:
                self._found.add(name)
                return parse(record, sample_id)
            if found not in self.names:
                hint = did_you_mean(nearest(found, self.names)) if isinstance(found, str) else ""
                raise DataError(
                    f"{sample_id}: {self.key} is {shortened(repr(found))}, expected an environment of {MIXTURE_KEY}:"
                    f" {', '.join(self.names)}{hint} ({KEY}: {self.key})"
                )
            return None

        return parse_own

    def own(self, lines: Iterator[PromptRecord | BadLine | None]) -> Iterator[PromptRecord | BadLine]:
        """Yield the records of one environment, and the bad lines that were not yielded for an earlier environment."""
        for line in lines:
            if isinstance(line, BadLine):
                if line.sample_id not in self._reported:
                    self._reported.add(line.sample_id)
                    yield line
            elif line is not None:
                yield line
