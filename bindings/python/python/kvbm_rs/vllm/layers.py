"""Loads and saves that go layer by layer, while the step that needs or computes them runs."""

from __future__ import annotations

from .process import EngineProcess
from .step_plan import Load, Save

__all__ = ["LAYER_WAIT", "LoadHangs", "StepLayers"]

#: Seconds that a step waits for a layer at most, unless `load_timeout` says so. The load has a
#: deadline of its own.
LAYER_WAIT = 60.0


class LoadHangs(RuntimeError):
    """A copy into blocks of a step's load does not end. vLLM must neither compute on these blocks
    nor give them away, so it ends with this.
    """

    def __init__(self, loads: list[Load]) -> None:
        names = ", ".join(load.request for load in loads)
        super().__init__(
            f"kvbm: the load of {names} did not end after its deadline: a copy may still write to its blocks; look at the "
            "device, and start vLLM again"
        )


class StepLayers:
    """The layers of a worker's step: what waits for them, and which are written."""

    def __init__(self, process: EngineProcess) -> None:
        self._process = process
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        #: Whether the step computes on blocks that did not arrive. vLLM computes all of it again.
        self.is_void = False
        #: Requests whose blocks arrive while the step runs.
        self.loads: list[str] = []
        #: Of these, requests that lacked a layer when vLLM needed it.
        self.late: set[str] = set()
        #: Of these, loads that are over: all their layers are in place.
        self.arrived: dict[str, Load] = {}
        #: What is copied while the step runs.
        self.saves: list[Save] = []
        self._waited: set[int] = set()
        self._written: set[int] = set()
        #: How many tensors the manager was told of.
        self._told = 0

    def wait(self, layer_name: str) -> None:
        """Waits until the layer's tensors are in place in all blocks."""
        timeout = self._process.options.load_timeout or LAYER_WAIT
        for tensor in self._process.tensors_of(layer_name):
            self._waited.add(tensor)
            for request in self.loads:
                if request in self.late or request in self.arrived:
                    continue
                if not self._process.own_manager.wait_layer(request, tensor, timeout):
                    # The others go on: what they load is right.
                    self.late.add(request)
                    self.is_void = True

    def fail(self) -> None:
        """It is not known which layers are in place."""
        self.late.update(self.loads)
        self.is_void = True

    @property
    def waited_for_all(self) -> bool:
        """Whether vLLM has waited for each layer."""
        return len(self._waited) == self._process.num_tensors

    def computed_without(self) -> list[Load]:
        """Loads that arrived, although a layer was late, or vLLM did not wait for each."""
        return [
            load
            for request, load in self.arrived.items()
            if request in self.late or not self.waited_for_all
        ]

    def written(self, layer_name: str) -> None:
        """vLLM has written the layer's tensors, or submitted that to its stream."""
        self._written.update(self._process.tensors_of(layer_name))
        done = self._told
        # A tensor is told with those before it, and where nothing that it is computed from may
        # lack.
        while done in self._written and (not self.loads or done in self._waited):
            done += 1
        self._tell(done)

    def end(self) -> None:
        """The step is over: all its tensors are written, or are when the stream has passed this."""
        if self.saves:
            self._tell(self._process.num_tensors)

    def _tell(self, done: int) -> None:
        # Nobody is told of a step that is void: its bytes are wrong.
        if done > self._told and not self.is_void:
            self._told = done
            self._process.layer_written(done - 1)

    def discard(self, timeout: float) -> None:
        """What is copied of a void step never counts. Waits until no copy is open: what is computed
        again is offered again.
        """
        blocks = sorted({block for save in self.saves for block in save.ids})
        if blocks:
            manager = self._process.manager
            manager.released(blocks)
            # They wait for layers: they go on, and find that their blocks are others.
            self._process.layer_written(self._process.num_tensors - 1)
            manager.before_reuse(blocks, timeout)
