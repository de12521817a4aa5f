"""What would make an engine fail after minutes of loading, asked before it is started, on the devices it would get."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llmgw.errors import OperatorError
from llmgw.hardware.gpu import compute_capability
from llmgw.hardware.inventory import Device, Fault
from llmgw.settings.catalog import Profile
from llmgw.settings.faults import Rule, dotted
from llmgw.settings.profile_rules import (
    MODEL_NAME,
    adapters,
    arguments,
    arithmetic,
    engine_fit,
    mig,
    offered,
    quantized,
    texts,
)


def refusals(model: str, profile: Profile, devices: Sequence[Device], version: str | None = None) -> tuple[Fault, ...]:
    """Every reason not to start this profile on these devices; the catalog's rules are asked again.

    ``version`` is the installed engine's, where it is known.
    """
    return tuple(_refusals(model, profile, devices, version))


def _refusals(model: str, profile: Profile, devices: Sequence[Device], version: str | None) -> Iterator[Fault]:
    if not MODEL_NAME.fullmatch(model):
        yield Fault("model-name", f"{model!r} is not a model name", "rename it in the settings")
    classes = sorted({d.device_class for d in devices})
    if len(classes) > 1:
        given = ", ".join(f"{d.label} is {d.device_class}" for d in devices)
        yield Fault(
            "mixed-classes", f"devices of different classes in one group: {given}", "give it devices of one class"
        )
    for device in devices:
        if device.device_class not in profile.device_class:
            wanted = " or ".join(profile.device_class)
            yield Fault("device-class", f"{device.label} is {device.device_class}, the profile wants {wanted}")
        if device.faults:
            yield Fault(device.faults[0].code, f"{device.label} {device.faults[0].reason}", device.faults[0].remedy)
    if len(devices) != profile.gpus:
        yield Fault("devices", f"the profile needs {profile.gpus} devices on a node, it was given {len(devices)}")
    capabilities = {d.label: d.compute_capability or compute_capability(d.device_class) for d in devices}
    rules: tuple[Iterator[Rule], ...] = (
        texts(profile),
        arithmetic(profile),
        mig(profile, classes),
        quantized(profile.engine, profile.quantization, capabilities),
        offered(profile, version),
        engine_fit(profile),
        adapters(model, profile, version),
        arguments(profile, version),
    )
    for path, problem, hint in (rule for some in rules for rule in some):
        yield Fault("profile", f"{dotted(path)}: {problem}", hint)


def require(model: str, profile: Profile, devices: Sequence[Device], version: str | None = None) -> None:
    """Raise :class:`OperatorError` with every refusal, if there is any."""
    found = refusals(model, profile, devices, version)
    if found:
        remedies = "; ".join(dict.fromkeys(f.remedy for f in found if f.remedy))
        raise OperatorError(f"profile {profile.name} of {model}", "; ".join(f.reason for f in found), remedies)
