"""Bodies that two readers could read in two ways are refused; everything else is passed on as it came."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.router.body import Asked, asked_in_json
from llmgw.router.errors import ApiError
from llmgw.router.form import asked_in_form, renamed
from llmgw.router.rewrite import rewritten


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        (b'{"model":"a","model":"b"}', "invalid_body", "'model' twice"),
        (b'{"model":"a","mod\\u0065l":"b"}', "invalid_body", "'model' twice"),
        (b'{"\\u006dodel":"a","model":"a"}', "invalid_body", "'model' twice"),
        (b'{"model":"a","\\u006D\\u006fd\\u0065l":"b"}', "invalid_body", "'model' twice"),
        (b'{"model":"a","x":NaN}', "invalid_json", ""),
        (b'{"model":"a","x":-Infinity}', "invalid_json", ""),
        (b'{"model":"a","x":"\\ud800"}', "invalid_json", "surrogate pair"),
        (b'{"model":"\\ud800"}', "invalid_json", "surrogate pair"),
        (b'{"model":"a","x":"\\udc00"}', "invalid_json", "surrogate pair"),
        (b'{"model":"a","x":"\\ud83d\\ude00', "invalid_json", "truncated"),
        (b'{"model":"a","x":"\xed\xa0\x80"}', "invalid_json", "not UTF-8"),
        (b'{"model":"a","x":"\xff"}', "invalid_json", "not UTF-8"),
        (b'\xef\xbb\xbf{"model":"a"}', "invalid_json", ""),
        (b'{"model":"a"}{"model":"b"}', "invalid_json", ""),
        (b'{"model":"a","x":01}', "invalid_json", ""),
        (b'{"model":"a","x":"\n"}', "invalid_json", ""),
        (b'{"model":"a",}', "invalid_json", ""),
        (b"{'model':'a'}", "invalid_json", ""),
        (b'{"model":"a","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json", "nested too deeply"),
        (b'{"model":"a","x":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001, "invalid_json", "nested too deeply"),
        (b'{"model":"a","url":' + b"[" * 500 + b"]" * 500 + b"}", "invalid_json", "nested too deeply"),
        (b'{"model":"a","stream":"yes"}', "invalid_body", "stream"),
        (b'{"model":"a","max_tokens":1.5}', "invalid_body", "max_tokens"),
        (b'{"model":["a"]}', "invalid_body", "model"),
        (b"null", "invalid_body", "object"),
        (b"", "invalid_json", ""),
    ],
)  # fmt: skip
def test_refused(body: bytes, code: str, said: str) -> None:
    with pytest.raises(ApiError) as refused:
        asked_in_json(body)
    assert (refused.value.status, refused.value.code) == (400, code)
    assert said in refused.value.message


def test_what_is_read() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "model": "a:b", "stream": True, "max_completion_tokens": 9}
    assert asked_in_json(json.dumps(body).encode()) == Asked(
        "a:b", True, 9, json.dumps(body["messages"]).encode(), answers=9
    )
    assert asked_in_json(b'{"model":"m","prompt":"p","max_tokens":3,"stream":null}') == Asked(
        "m", False, 3, b'"p"', answers=3
    )
    assert asked_in_json(b'{"model":"m","max_tokens":-5,"input":["x"]}') == Asked("m", False, 0, b'["x"]', answers=0)


def test_what_only_an_engine_judges_is_passed_on() -> None:
    for odd in ({"n": "3"}, {"stream_options": "x"}, {"max_output_tokens": 1.5}):
        assert asked_in_json(json.dumps({"model": "m", "max_tokens": 3, **odd}).encode()) == Asked("m", False, 3)
    streamed = {"model": "m", "stream": True, "stream_options": {"include_usage": True}}
    assert asked_in_json(json.dumps(streamed).encode()) == Asked("m", True, usage=True)


@pytest.mark.parametrize(
    "body",
    [
        {"model": "m", "tools": [{"parameters": {"properties": {"model": {"type": "string"}}}}]},
        {"model": "m", "messages": [{"content": 'say "model": and \\u0065'}]},
        {"model": "m", "metadata": {"model": "x", "url": {"type": "string"}}, "n": 10**400},
        {"model": "m", "messages": [{"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}]},
        {"model": "m", "messages": [{"content": [{"image_url": "https://images.example.com/a.png?x=1"}]}]},
    ],
)  # fmt: skip
def test_odd_and_right(body: dict[str, object]) -> None:
    assert asked_in_json(json.dumps(body).encode()).model == "m"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://10.0.0.1/x"}}]}]},
        {"messages": [{"content": [{"type": "image", "source": {"type": "url", "url": "http://[::1]/x"}}]}]},
        {"input": [{"content": [{"type": "input_image", "image_url": "http://metadata/latest"}]}]},
        {"messages": [{"content": [{"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}}]}]},
    ],
)
def test_addresses_are_found_wherever_an_api_has_them(body: dict[str, object]) -> None:
    with pytest.raises(ApiError, match="The address") as refused:
        asked_in_json(json.dumps({"model": "m", **body}).encode())
    assert refused.value.code == "invalid_media_url"


def test_an_address_under_an_escaped_name_is_found() -> None:
    with pytest.raises(ApiError, match="The address"):
        asked_in_json(b'{"model":"m","messages":[{"content":[{"\\u0069mage_\\u0075rl":"http://127.0.0.1/"}]}]}')


@given(st.binary(max_size=200) | st.text(max_size=80).map(lambda t: json.dumps({"model": t, "x": t}).encode()))
def test_whatever_comes_in_is_asked_or_refused_and_read_as_json_has_it(body: bytes) -> None:
    try:
        asked = asked_in_json(body)
    except ApiError as refused:
        assert refused.status == 400
        return
    assert json.loads(body)["model"] == asked.model


@pytest.mark.parametrize(
    ("body", "model", "salt", "made"),
    [
        (b'{"model": "a", "n":1}', "b", None, b'{"model": "b", "n":1}'),
        (b'{ "x": 1e3,"model" :"a\\"\\u00e9"}', 'b"', None, b'{ "x": 1e3,"model" :"b\\""}'),
        (b' {"model":"a"}', None, "t", b' {"cache_salt":"t","model":"a"}'),
        (b'{"model":"a"}', "b", "t", b'{"cache_salt":"t","model":"b"}'),
        (b'{"model":"a","cache_salt":"theirs"}', None, "t", b'{"model":"a","cache_salt":"t"}'),
        (b'{"model":"a","cache_salt":"theirs"}', None, None, b'{"model":"a"}'),
        (b'{"model":"a","cache_s\\u0061lt":"theirs"}', None, "t", b'{"model":"a","cache_salt":"t"}'),
        (b'{"model":"a","cache\\u005Fsalt":"theirs"}', None, "t", b'{"model":"a","cache_salt":"t"}'),
        (b'{"tool":{"model":"x"},"model":"a"}', "b", None, b'{"tool":{"model":"x"},"model":"b"}'),
        (b'{"\\u006dodel":"a"}', "b", None, b'{"model":"b"}'),
    ],
)
def test_rewritten(body: bytes, model: str | None, salt: str | None, made: bytes) -> None:
    asked_in_json(body)
    assert rewritten(body, model, salt) == made


@given(
    st.dictionaries(
        st.sampled_from(["messages", "cache_salt", "n", 'say "model":"x"']) | st.text(max_size=8),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
            max_leaves=6,
        ),
        max_size=5,
    ),
    st.booleans(),
    st.none() | st.text(min_size=1, max_size=9),
    st.none() | st.text(min_size=1, max_size=9),
)  # fmt: skip
def test_whatever_is_rewritten_says_the_same_otherwise(
    members: dict[str, object], as_ascii: bool, model: str | None, salt: str | None
) -> None:
    members["model"] = "m"
    body = json.dumps(members, ensure_ascii=as_ascii).encode("utf-8", "surrogatepass")
    try:
        asked_in_json(body)
    except ApiError:
        return  # types that an engine would refuse, or half a surrogate pair
    found = json.loads(rewritten(body, model, salt))
    members["model"] = model or "m"
    members.pop("cache_salt", None)
    if salt is not None:
        members["cache_salt"] = salt
    assert found == members


BOUNDARY = b"multipart/form-data; boundary=xYz"


def form(*parts: tuple[bytes, bytes], boundary: bytes = b"xYz", file: bytes = b"") -> bytes:
    made = b"".join(
        b'--%b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % (boundary, name, extra, value)
        for name, value, extra in (
            *((name, value, b"") for name, value in parts),
            *([(b"file", file, b'; filename="a.wav"\r\nContent-Type: audio/wav')] if file else []),
        )
    )
    return made + b"--" + boundary + b"--\r\n"


def test_forms() -> None:
    assert asked_in_form(form((b"model", b"whisper"), file=b"RIFF\r\n\r\n--xY"), BOUNDARY) == Asked("whisper")
    assert asked_in_form(form((b"stream", b"true"), (b"model", "ü".encode())), BOUNDARY) == Asked("ü", True)
    quoted = b'Multipart/Form-Data;boundary="a b"'
    assert asked_in_form(form((b"model", b"m"), boundary=b"a b"), quoted) == Asked("m")


@pytest.mark.parametrize(
    ("body", "content_type", "said"),
    [
        (form((b"model", b"a"), (b"model", b"b")), BOUNDARY, "model twice"),
        (form((b"file", b"x")), BOUNDARY, "no field model"),
        (form((b"model", b"")), BOUNDARY, "no field model"),
        (form((b"model", b"\xff")), BOUNDARY, "not UTF-8"),
        (form((b"model", b"a")), b"application/json", "boundary"),
        (form((b"model", b"a")), b"", "boundary"),
        (form((b"model", b"a")), b"multipart/form-data; boundary=", "boundary"),
        (form((b"model", b"a")), b"multipart/form-data; boundary=a; boundary=xYz", "boundary"),
        (form((b"model", b"a"))[:-4], BOUNDARY, "begin and end"),
        (b"junk" + form((b"model", b"a")), BOUNDARY, "begin and end"),
        (b"--xYz\r\n\r\nx\r\n--xYz--", BOUNDARY, "no name"),
        (b'--xYz\r\nContent-Disposition: form-data; name="a"; name="model"\r\n\r\nx\r\n--xYz--', BOUNDARY, ""),
        (form(*[(b"a", b"x")] * 300), BOUNDARY, "more than 200 parts"),
        (b"", BOUNDARY, "begin and end"),
    ],
)  # fmt: skip
def test_forms_that_are_refused(body: bytes, content_type: bytes, said: str) -> None:
    with pytest.raises(ApiError) as refused:
        asked_in_form(body, content_type)
    assert refused.value.status == 400
    assert said in refused.value.message


def test_a_form_for_another_name() -> None:
    body = form((b"prompt", b"model"), (b"model", b"alias"), file=b"\x00\r\nmodel\r\n")
    wanted = form((b"prompt", b"model"), (b"model", "größer".encode()), file=b"\x00\r\nmodel\r\n")
    assert renamed(body, BOUNDARY, "größer") == wanted


@given(st.binary(max_size=300), st.sampled_from([BOUNDARY, b'multipart/form-data; boundary="-"']))
def test_any_form_is_asked_or_refused(body: bytes, content_type: bytes) -> None:
    for made in (body, b"--xYz\r\n" + body + b"\r\n--xYz--"):
        try:
            assert asked_in_form(made, content_type).model
        except ApiError as refused:
            assert refused.status == 400
