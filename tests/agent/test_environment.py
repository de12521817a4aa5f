"""What an engine gets of the agent's environment."""

from __future__ import annotations

from llmgw.agent.process import environment


def test_no_token_and_nothing_that_is_the_agents_alone() -> None:
    own = {
        "PATH": "/bin", "LC_ALL": "C", "HF_HOME": "/hub", "HTTPS_PROXY": "http://p", "HF_TOKEN": "hf_secret",
        "HF_TOKEN_PATH": "/secret", "NOTIFY_SOCKET": "/run/n", "AWS_SECRET_ACCESS_KEY": "x", "VLLM_API_KEY": "theirs",
    }  # fmt: skip
    made = environment(own, {"VLLM_API_KEY": "ours"}, {"HF_TOKEN": "of the profile"})
    assert made == {
        "PATH": "/bin", "LC_ALL": "C", "HF_HOME": "/hub", "HTTPS_PROXY": "http://p", "VLLM_API_KEY": "ours",
        "HF_TOKEN": "of the profile",
    }  # fmt: skip
    assert "hf_secret" not in environment(own).values()
