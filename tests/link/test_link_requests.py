"""What a stranger may send as a certificate request: whatever it is, the answer is a refusal."""

from __future__ import annotations

import base64

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from llmgw.errors import LlmgwError
from llmgw.link.authority import new_key, request_for, requested_key


def _pem(der: bytes) -> str:
    label = "CERTIFICATE REQUEST"
    return f"-----BEGIN {label}-----\n{base64.encodebytes(der).decode()}-----END {label}-----\n"


def test_no_changed_byte_of_a_request_is_granted_or_raises_anything_else() -> None:
    der = x509.load_pem_x509_csr(request_for(new_key()).encode()).public_bytes(Encoding.DER)
    requested_key(_pem(der))
    for at in range(len(der)):
        for change in (0x01, 0x80, 0xFF):
            other = bytearray(der)
            other[at] ^= change
            with pytest.raises(LlmgwError, match="certificate request"):
                requested_key(_pem(bytes(other)))
