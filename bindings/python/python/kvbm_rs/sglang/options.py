"""The options of both classes."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from .. import Config
from ..errors import ConfigInvalid
from ..model_identity import has_operator_version, weights_version
from ..recording import RECORD_LIMIT
from ..settings import read_settings
from . import _sglang_compat as compat

__all__ = ["Options"]

logger = logging.getLogger("kvbm_rs.sglang")

_LEVELS = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40}


@dataclass(frozen=True)
class Options:
    """What an operator set, for one rank."""

    #: Settings of kvbm.
    config: Config
    #: The version of the weights.
    weights: str
    #: The lowest level of kvbm's log records.
    log_level: int
    #: A file that takes a line for each call to the manager.
    record: str | None
    #: Most bytes of that file.
    record_limit: int

    @classmethod
    def read(cls, rank: compat.Rank, where: str) -> Options:
        """From the extra configuration of a rank."""
        config, own = read_settings(
            rank.extra,
            where=where,
            own=("weights", "log_level", "record", "record_limit"),
            folder=rank.folder,
        )
        level = own.get("log_level", "INFO")
        if level not in _LEVELS:
            raise ConfigInvalid(
                f"{where}: option 'log_level' is {level!r}: give one of {', '.join(_LEVELS)}"
            )
        by_operator = has_operator_version(config.to_toml())
        weights = own.get("weights")
        if weights is None:
            settings = rank.settings
            weights = weights_version(settings.weights or rank.model, settings.revision)
            if not weights and not by_operator:
                logger.warning(
                    "kvbm: the version of the weights of %s is not known: set the option 'weights', or pages of "
                    "earlier weights of that name are found",
                    rank.model,
                )
        if rank.settings.unknown and not by_operator:
            logger.warning(
                "kvbm: it is not known what SGLang was started with: %s. Pages that were computed with other values "
                "are found: set the option 'namespace.weights' to a text, and change it with them",
                ", ".join(rank.settings.unknown),
            )
        record = own.get("record")
        return cls(
            config=config,
            weights=str(weights),
            log_level=_LEVELS[level],
            # Each rank writes a file of its own.
            record=None if record is None else f"{record}.{rank.folder}",
            record_limit=own.get("record_limit", RECORD_LIMIT),
        )
