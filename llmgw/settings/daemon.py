"""``server.yaml`` and ``agent.yaml``: only what a process needs to start.

Paths are text as the operator wrote them, already resolved against the folder of the file that holds them;
listeners are ``host:port`` pairs.
"""

from __future__ import annotations

from enum import StrEnum

from attrs import frozen

from llmgw.hardware.fabric import FabricRule
from llmgw.settings.catalog import EngineKind


@frozen
class Address:
    """A host and a port, written ``host:port`` (``[::1]:8000`` for IPv6)."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class LogFormat(StrEnum):
    """``auto`` is text on a terminal and JSON elsewhere."""

    AUTO = "auto"
    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    """The least serious line that is written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@frozen
class Log:
    """What a daemon writes to its standard error."""

    level: LogLevel = LogLevel.INFO
    format: LogFormat = LogFormat.AUTO


@frozen
class TlsFiles:
    """One end's identity on the link: its certificate chain, its key, and the CA bundle that it trusts."""

    certificate: str
    key: str
    ca: str


@frozen
class RouterTls:
    """The router's own identity towards clients: certificate chain and key, in PEM files."""

    certificate: str
    key: str


@frozen
class Cors:
    """Which web pages may use the router from a browser: their origins (``https://chat.example.org``), or ``*``."""

    origins: tuple[str, ...] = ()


MOST_WORKERS = 8


@frozen
class RouterListener:
    """Where clients connect. On SIGTERM streams in flight get ``drain_s`` to finish.

    ``workers`` is the number of processes; ``None`` is one a core, up to 4. With ``access_log`` each request is a line
    of the log, at level info.
    """

    listen: Address = Address("127.0.0.1", 8000)
    drain_s: float = 30.0
    workers: int | None = None
    tls: RouterTls | None = None
    cors: Cors = Cors()
    access_log: bool = False


@frozen
class AdminTls:
    """The admin listener's identity. With ``ca``, a bundle, certificates from it say who somebody is; the trust domain
    in them is the link's, or without a link this one."""

    certificate: str
    key: str
    ca: str | None = None
    trust_domain: str = "llmgw.local"


@frozen
class AdminListener:
    """Where people and ``llmgw ctl`` connect: over HTTPS with ``tls``.

    ``advertise`` is where others reach it, should that not be ``listen``.
    """

    listen: Address = Address("127.0.0.1", 8001)
    tls: AdminTls | None = None
    advertise: Address | None = None


@frozen
class Issuing:
    """What the control plane needs to issue certificates itself: to nodes that join, and to renew.

    ``ca`` is the folder that ``llmgw ca init`` made. Certificates are for ``node_hours``; one that expired at most
    ``renew_expired_days`` ago may still be renewed, and do nothing else.
    """

    ca: str
    node_hours: float = 24.0
    renew_expired_days: float = 7.0


@frozen
class LinkListener:
    """Where agents connect.

    Without ``issuing`` certificates come from elsewhere: nothing joins and nothing is renewed over the link. With
    ``nodes`` no other node gets in, whatever its certificate says. One address holds at most
    ``connections_per_address`` connections open. ``advertise`` is where agents reach it, should that not be ``listen``:
    one of several control planes sends them there when it leads.
    """

    tls: TlsFiles
    listen: Address = Address("127.0.0.1", 8443)
    trust_domain: str = "llmgw.local"
    issuing: Issuing | None = None
    nodes: tuple[str, ...] | None = None
    connections_per_address: int = 200
    advertise: Address | None = None


@frozen
class ServerConfig:
    """``server.yaml``. ``link`` may be left out where only static endpoints are routed.

    ``store`` is the address of a PostgreSQL database; without it the store is a SQLite file in ``state_dir``.
    """

    state_dir: str
    settings: str
    store: str | None = None
    router: RouterListener = RouterListener()
    admin: AdminListener = AdminListener()
    link: LinkListener | None = None
    log: Log = Log()


class GpuSource(StrEnum):
    """How GPUs are read. ``auto`` is NVML, and nvidia-smi with the reason said where NVML does not work."""

    AUTO = "auto"
    NVML = "nvml"
    NVIDIA_SMI = "nvidia-smi"
    NONE = "none"


@frozen
class Discovery:
    """How and where the hardware is read. ``root`` other than ``/`` is a captured or fake machine's folder.

    With ``source: nvml`` an NVML that does not work is an error and no GPU is reported. ``timeout_s`` bounds each
    program that is run.
    """

    source: GpuSource = GpuSource.AUTO
    root: str = "/"
    nvidia_smi: str | None = None
    interval_s: float = 60.0
    timeout_s: float = 20.0


@frozen
class EngineInstall:
    """An engine on this node: the command that starts it, before the arguments that llmgw adds.

    ``vllm`` is usually ``[vllm, serve]``, SGLang ``[python, -m, sglang.launch_server]``, llama.cpp
    ``[llama-server]``. ``version`` lets the adapter leave out flags that this version lacks.
    """

    kind: EngineKind
    command: tuple[str, ...]
    version: str | None = None


@frozen
class WeightsConfig:
    """Where this node keeps weights that it fetches: ``cache``, in huggingface_hub's layout, may be shared with other
    nodes and programs; empty is ``hub`` in the state folder. ``token_file`` has the hub's token, 0600. ``reserve_gib``
    always stays free on the cache's disk.
    """

    cache: str = ""
    token_file: str = ""
    reserve_gib: float = 10.0


@frozen
class DoctorRules:
    """What ``llmgw doctor`` leaves out on a node: ``skip`` are ids of checks, or how ids begin (``port``)."""

    skip: tuple[str, ...] = ()


@frozen
class AgentConfig:
    """``agent.yaml``. ``address`` is where the router reaches this node's engines.

    Engines get HTTP ports from ``port_first`` to ``port_last``, both included. Relative weights resolve
    under ``weights_dir``.
    """

    id: str
    control_planes: tuple[Address, ...]
    tls: TlsFiles
    state_dir: str
    address: str = "127.0.0.1"
    port_first: int = 20000
    port_last: int = 20999
    weights_dir: str = "/"
    trust_domain: str = "llmgw.local"
    discovery: Discovery = Discovery()
    fabrics: tuple[FabricRule, ...] = ()
    weights: WeightsConfig = WeightsConfig()
    engines: tuple[EngineInstall, ...] = ()
    log: Log = Log()
    doctor: DoctorRules = DoctorRules()

    @property
    def weights_cache(self) -> str:
        """Where fetched weights are."""
        return self.weights.cache or f"{self.state_dir}/hub"

    def engine(self, kind: EngineKind) -> EngineInstall | None:
        """The install of this kind of engine, if the node has one."""
        return next((e for e in self.engines if e.kind is kind), None)
