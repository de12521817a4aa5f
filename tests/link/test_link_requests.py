"""What a stranger may send as a certificate request: whatever it is, the answer is a refusal."""

from __future__ import annotations

import base64

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from llmgw.errors import LlmgwError
from llmgw.link.authority import new_key, request_for, requested_key


def _pem(der: bytes) -> str:
    label = "CERTIFICATE REQUEST"
    return f"-----BEGIN {label}-----\n{base64.encodebytes(der).decode()}-----END {label}-----\n"


def test_no_changed_byte_of_a_request_gets_another_key_granted_or_raises_anything_else() -> None:
    der = x509.load_pem_x509_csr(request_for(new_key()).encode()).public_bytes(Encoding.DER)
    key = requested_key(_pem(der))
    for at in range(len(der)):
        for change in (0x01, 0x80, 0xFF):
            other = bytearray(der)
            other[at] ^= change
            try:
                granted = requested_key(_pem(bytes(other)))
            except LlmgwError as refused:
                assert "certificate request" in str(refused)
            else:
                # Not every bit of the encoding around a signature counts; what was signed is what was signed.
                assert granted.public_numbers() == key.public_numbers(), (at, change)
