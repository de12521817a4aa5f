"""What an engine adapter is given and what it makes of it. Nothing here starts a process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import field, frozen

from llmgw.engines.nccl import nccl_env
from llmgw.engines.weights import Weights, weights_of
from llmgw.errors import OperatorError
from llmgw.hardware.inventory import Device, Fabric
from llmgw.settings.catalog import Profile
from llmgw.settings.daemon import Address, EngineInstall


@frozen
class ShardSpec:
    """Everything that decides an engine's command line.

    ``devices`` are the node's devices in placement order; ``host`` and ``port`` is where the engine's API
    listens; ``weights_dir`` is what weights resolve under; ``api_key`` goes to the engine by environment or file,
    never by argument. Over several nodes the ranks meet at ``rendezvous`` on rank 0's node, find each other over this
    node's ``interface`` and exchange data over its ``fabric``. ``fetched`` is where the agent put weights of a hub,
    which need not be below ``weights_dir``.
    """

    model: str
    profile: Profile
    devices: tuple[Device, ...]
    install: EngineInstall
    host: str
    port: int
    weights_dir: str
    rank: int = 0
    api_key: str | None = field(default=None, repr=False)
    rendezvous: Address | None = None
    interface: str = ""
    fabric: Fabric | None = None
    addresses: tuple[str, ...] = ()
    fetched: str | None = None

    @property
    def weights(self) -> Weights:
        """What the engine is told of its weights. Raises :class:`OperatorError` when they lead out of the folder."""
        if self.fetched is not None:
            return Weights(self.fetched, True)
        return weights_of(self.profile.weights, self.profile.engine, self.weights_dir)

    @property
    def meeting(self) -> Address:
        """Where the ranks of several nodes meet. Raises :class:`OperatorError` where nobody said so."""
        if self.rendezvous is None:
            raise OperatorError(f"rank {self.rank} of {self.model}", "was not told where rank 0 waits", "")
        return self.rendezvous


def cuda_env(devices: Sequence[Device]) -> dict[str, str]:
    """Exactly these devices, by UUID: indices depend on the order in which CUDA counts."""
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(d.uuid for d in devices)}


def rank_env(spec: ShardSpec) -> dict[str, str]:
    """The shard's devices, and where it is one of several ranks the network that they share."""
    made = cuda_env(spec.devices)
    if spec.profile.nodes > 1:
        # How much NCCL logs is the only one of these that a profile may say itself.
        made |= {name: value for name, value in nccl_env(spec.fabric, spec.interface).items()
                 if name != "NCCL_DEBUG" or name not in spec.profile.env}  # fmt: skip
    return made


@frozen
class Launch:
    """A process to start, as a value: what to run, with which environment, and how to ask it how it is.

    It runs in its shard's folder, which is private and goes away with the shard.

    ``env`` holds only what llmgw sets; the agent adds an allow-list of its own environment. ``secrets`` are
    variables too, kept apart so that no log shows them; ``files`` are written into the folder, for its owner alone,
    before the process starts. ``api_key`` is what the engine will want as a bearer token,
    ``ready_name`` what ``GET models_path`` must list, and a probe that takes longer than ``probe_timeout_s`` failed.
    ``orderly`` says that its first process, asked to end, lets the others finish what they have: it alone is asked.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    host: str
    port: int
    ready_name: str
    secrets: Mapping[str, str] = field(factory=dict, repr=False)
    files: Mapping[str, str] = field(factory=dict, repr=False)
    api_key: str | None = field(default=None, repr=False)
    health_path: str = "/health"
    models_path: str = "/v1/models"
    probe_timeout_s: float = 5.0
    orderly: bool = False

    @property
    def endpoint(self) -> str:
        """Base URL of the engine's API."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"
