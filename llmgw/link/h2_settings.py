"""HTTP/2 settings that cost little: a control plane keeps those of both ends of a thousand connections."""

from __future__ import annotations

from h2.settings import ChangedSetting, SettingCodes, Settings

_KNOWN = frozenset(SettingCodes)


class SmallSettings(Settings):
    """As h2's, in a tenth of the memory, and those that h2 has no name for are not kept.

    h2 has a deque for each setting, of 0.7 KiB for one number, and one for each of the 65,536 that a peer may make up;
    RFC 9113 (section 6.5.2) has unknown ones ignored. Here a list has the value that holds and those that the other
    end has not acknowledged.
    """

    def __init__(self, client: bool = True, initial_values: dict[SettingCodes, int] | None = None) -> None:
        super().__init__(client, initial_values)
        self._values: dict[SettingCodes | int, list[int]] = {code: [*values] for code, values in self._settings.items()}
        self._settings = self._values  # type: ignore[assignment]

    def acknowledge(self) -> dict[SettingCodes | int, ChangedSetting]:
        """What was proposed first holds from now on; returns what changed."""
        changed = {}
        for code, values in self._values.items():
            if len(values) > 1:
                changed[code] = ChangedSetting(code, values.pop(0), values[0])
        return changed

    def __setitem__(self, key: SettingCodes | int, value: int) -> None:
        if key not in _KNOWN:
            return
        self._values.setdefault(key, [None])  # type: ignore[list-item]
        super().__setitem__(key, value)
