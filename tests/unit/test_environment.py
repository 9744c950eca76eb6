"""What tests set in the environment of frameworks, users do not have."""

from tests.environment import ALL, of_users


def test_users_have_none_of_it(monkeypatch):
    for setting in ALL:
        assert setting.reason
        monkeypatch.setenv(setting.name, setting.value)
    monkeypatch.setenv("KERASDIST_RANK", "1")
    environment = of_users()
    assert not {setting.name for setting in ALL} & set(environment)
    assert environment["KERASDIST_RANK"] == "1"
