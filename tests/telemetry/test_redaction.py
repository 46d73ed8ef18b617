"""Secrets, e-mail addresses and card numbers are taken out of captured text, and little else is."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guard.telemetry.redaction import redaction

ALL = ("secrets", "emails", "cards")


def redacted(text: str, names: tuple[str, ...] = ALL, **patterns: str) -> tuple[str, dict[str, int]]:
    counted: Counter[str] = Counter()
    return redaction(names, patterns)(text, counted), dict(counted)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mail me at jo.doe+x@mail.example.org, please", "mail me at [email], please"),
        ("card 4111 1111 1111 1111 ok", "card [card] ok"),
        ("card 4111-1111-1111-1111", "card [card]"),
        ("amex 378282246310005.", "amex [card]."),
        ("my key is sk-proj-abcdefghijklmnop0123456789", "my key is [secret]"),
        ("AKIAIOSFODNN7EXAMPLE", "[secret]"),
        ("ghp_" + "a1" * 18, "[secret]"),
        ("Authorization: Bearer abcdef0123456789", "Authorization: Bearer [secret]"),
        ('{"password": "hunter2hunter2"}', '{"password": "[secret]"}'),
        ("DB_PASSWORD=correct-horse", "DB_PASSWORD=[secret]"),
        ("postgres://app:s3cr3tpw@db/x", "postgres://app:[secret]@db/x"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NSJ9.c2lnbmF0dXJl", "[secret]"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----\nrest", "[secret]\nrest"),
        ("-----BEGIN PRIVATE KEY-----\nMIIE cut off", "[secret]"),
        ("4111 1111 1111 1111 12/27", "[card] 12/27"),
        ("pay 2 4111 1111 1111 1111", "pay 2 [card]"),
        ("2 4111111111111111 123", "2 [card] 123"),
        ("4111-1111-1111-1111-123 and 3 3782 822463 10005 4", "[card]-123 and 3 [card] 4"),
        ("4111 1111 1111 1111 5555 5555 5555 4444", "[card] [card]"),
        ("password=p@ssw0rd123", "password=[secret]"),
        ("client_secret=ab,cdefghijk", "client_secret=[secret]"),
        ("password=abc;defgh, next", "password=[secret], next"),
        ('password: "correct horse battery"', 'password: "[secret]"'),
        ("{'secret_key': 'it is \"quoted\"'}", "{'secret_key': '[secret]'}"),
        (r"{\"password\": \"hunter2hunter2\", \"x\": 1}", r"{\"password\": \"[secret]\", \"x\": 1}"),
        ("postgres://u:p@ss@h/db", "postgres://u:[secret]@h/db"),
        ("redis://:pw@h", "redis://:[secret]@h"),
        ("SG." + "a1" * 11 + "." + "b-" * 21 + "c", "[secret]"),
        ("a@b.example+c@d.example, e@f.example", "[email], [email]"),
        ("curl -u admin:SuperSecret99 https://h/x", "curl -u admin:[secret] https://h/x"),
        ("curl --user 'admin:SuperSecret99' h", "curl --user 'admin:[secret]' h"),
        ("curl -uadmin:pass1 h", "curl -uadmin:[secret] h"),
        ("login --password hunter2hunter2 --verbose", "login --password [secret] --verbose"),
        ("123456789:AAHd" + "a-_1" * 7 + "xyz", "[secret]"),
        ("https://api.telegram.org/bot123456789:AAHd" + "aB1_" * 7 + "xyz/x", "https://api.telegram.org/bot[secret]/x"),
        ("Cookie: session=abc123; theme=dark\nHost: h", "Cookie: [secret]\nHost: h"),
        ("Set-Cookie: sid=abc123; Path=/; HttpOnly", "Set-Cookie: [secret]"),
        ("curl -H 'Cookie: session=abc123' h", "curl -H 'Cookie: [secret]' h"),
        (r"{\"Cookie\": \"session=abc123\", \"x\": 1}", r"{\"Cookie\": \"[secret]\", \"x\": 1}"),
        ("4111.1111.1111.1111", "[card]"),
        ("card 4111/1111/1111/1111, 3782.822463.10005", "card [card], [card]"),
        ("4111  1111  1111  1111 and 4111 - 1111 - 1111 - 1111", "[card] and [card]"),
        ('mail "a b"@example.com or c@[192.0.2.1]', "mail [email] or [email]"),
        ("o'brien@example.com", "[email]"),
        ("Passwort: geheim123!", "Passwort: [secret]"),
        ("Mot de passe : azerty123", "Mot de passe : [secret]"),
        ("contraseña: secreta99, пароль: qwerty12", "contraseña: [secret], пароль: [secret]"),
        ("密码\uff1aabc12345", "密码\uff1a[secret]"),
        ("Server=h;Uid=sa;Pwd=Sup3rS3cret", "Server=h;Uid=sa;Pwd=[secret]"),
        ("https://hooks.slack.com/services/T01234567/B01234567/" + "aB3" * 8, "https://[secret]"),
        ("curl -u 'user:pa ss word' h", "curl -u 'user:[secret]' h"),
        ('curl -u "user:p\\"w d" h', 'curl -u "user:[secret]" h'),
        ("curl -su user:pass h", "curl -su user:[secret] h"),
        ("curl -sSLu 'user:pw' h", "curl -sSLu 'user:[secret]' h"),
        ("curl -b 'session=abc 123' h", "curl -b [secret] h"),
        ("curl -sb session=abc123 h", "curl -sb [secret] h"),
        ('curl --cookie "sid=abc123; a=b" h', "curl --cookie [secret] h"),
        ('Cookie: session="abc 123"; theme=dark\nHost: h', "Cookie: [secret]\nHost: h"),
        (r'{"h": "Cookie: session=\"abc123\"; b=c"}', '{"h": "Cookie: [secret]"}'),
        ('{"Cookie": ["session=abc123", "b=c"], "x": 1}', '{"Cookie": [[secret]], "x": 1}'),
        ("[('Cookie', 'session=abc123'), ('Host', 'h')]", "[('Cookie', '[secret]'), ('Host', 'h')]"),
        ('{"cookies": {"session": "abc123secret"}, "x": 1}', '{"cookies": {[secret]}, "x": 1}'),
        ("get(url, cookies={'session': 'abc123'})", "get(url, cookies={[secret]})"),
        ('"cookies": [{"name": "sid", "value": "abc"}]', '"cookies": [[secret]]'),
        ("Authorization: Token abcdef123456", "Authorization: Token [secret]"),
        ("Authorization: ApiKey abcdef\nHost: h", "Authorization: ApiKey abcdef\nHost: h"),
        ("-H 'Authorization: ApiKey abcdef' h", "-H 'Authorization: ApiKey [secret]' h"),
        ("Authorization: Basic dTpw, then", "Authorization: Basic [secret], then"),
        ("Proxy-Authorization: Basic dXNlcjpwdw==", "Proxy-Authorization: Basic [secret]"),
        ('{"Authorization": "Token abcdef"}', '{"Authorization": "Token [secret]"}'),
        ("authorization: abcdef1234567890", "authorization: [secret]"),
        ('Authorization: Digest username="u", response="66ab"\nx', "Authorization: Digest [secret]\nx"),
        ("wget --http-password x h", "wget --http-password [secret] h"),
        ("wget --ftp-password='a b' h", "wget --ftp-password=[secret] h"),
        ("sshpass -p hunter2 ssh h", "sshpass -p [secret] ssh h"),
        ("machine h login u password p\nmachine i", "machine h login u password [secret]\nmachine i"),
        ("machine h\n  login u\n  account a\n  password p", "machine h\n  login u\n  account a\n  password [secret]"),
        ("default login u password p", "default login u password [secret]"),
        ("<password>a</password>", "<password>[secret]</password>"),
        ("<password>a]b</password>", "<password>[secret]</password>"),
        ('{"Cookie": ["a=b1]c", "d=e"]}', '{"Cookie": [[secret]]}'),
        ('<db:userPassword x="1">hunter 2</db:userPassword>', '<db:userPassword x="1">[secret]</db:userPassword>'),
        ("<client_secret><![CDATA[a b]]></client_secret>", "<client_secret><![CDATA[[secret]]]></client_secret>"),
        ('<add key="DbPassword" value="hunter2"/>', '<add key="DbPassword" value="[secret]"/>'),
        ('{"name": "DB_PASSWORD", "value": "hunter2"}', '{"name": "DB_PASSWORD", "value": "[secret]"}'),
        ("- name: API_TOKEN\n  value: hunter2", "- name: API_TOKEN\n  value: [secret]"),
        (r'password = "it is \"quoted\" twice", x', 'password = "[secret]", x'),
        (r"{'secret': 'it\'s a secret', 'x': 1}", "{'secret': '[secret]', 'x': 1}"),
        (r'mail "c\"d"@example.com now', "mail [email] now"),
        ("-----BEGIN PGP PRIVATE KEY BLOCK-----\nlQOYBF7x\n-----END PGP PRIVATE KEY BLOCK----- z", "[secret] z"),
        ("DB_PASS=hunter2xyz99 x", "DB_PASS=[secret] x"),
        ("export MYSQL_PWD=hunter2xyz", "export MYSQL_PWD=[secret]"),
        ("pass: hunter2xyz", "pass: [secret]"),
        ("password=abc12, password: 12345", "password=[secret], password: [secret]"),
        ('"password": "abc12"', '"password": "[secret]"'),
        ("mysql -u root -phunter2xyz db", "mysql -u root -p[secret] db"),
        ("mysqldump -P 3306 -p'hunter 2' db", "mysqldump -P 3306 -p[secret] db"),
        ("https://x.example/c?sv=2020&sig=AbCdEf0123456789%2Bxyz%3D z", "https://x.example/c?sv=2020&sig=[secret] z"),
        ("'password' => 'hunter2xyz', :password => 'hunter2xyz'", "'password' => '[secret]', :password => '[secret]'"),
        ("password := hunter2xyz", "password := [secret]"),
        ('"password": ["hunter2xyz"]', '"password": ["[secret]"]'),
        ("secret: |\n  hunter2xyz\nx: 1", "secret: |\n  [secret]\nx: 1"),
        ("password: correct horse battery staple", "password: [secret] horse battery staple"),
        ("whsec_abcdefghijklmnop0123456789abcd hvs.CAESIabcdefghijklmnopqrstuv", "[secret] [secret]"),
        ("gsk_abcdefghijklmnopqrstuvwx0123 r8_abcdefghijklmnopqrstuvwxyz0123456789", "[secret] [secret]"),
        ("nvapi-abcdefghijklmnopqrstuvwxyz sbp_0123456789abcdef0123456789abcdef01234567", "[secret] [secret]"),
        ("AGE-SECRET-KEY-1" + "Q" * 58, "[secret]"),
    ],
)
def test_what_is_written_as_usual_is_taken_out(text: str, expected: str) -> None:
    assert redacted(text)[0] == expected


@pytest.mark.parametrize(
    "text",
    [
        "order 4111 1111 1111 1112 has no right check digit",
        "2026-11-30 12:00:00, 1234567890123",
        "the token of the day: yes",
        "user@localhost and a@b",
        '{"token":null,"api_key":false,"n":1}',
        "http://host:8080/a@b and https://host/x:y@z",
        "rows 10 20 30 40 50 60 70 80 90 15",
        "a task-force, basic income, risk-averse",
        "cookie: a small cake, and cookies = good",
        "docker run -u 1000:1000 image, sort -u a:b",
        "PWD=/home/somebody/project",
        "4111.1111.1111.1112 and 192.168.100.200, 1.2345.6789",
        'he said "a b" @ noon, "x"@y',
        "at 12345678:90 and 123456789:short",
        "curl -u is the option for a user: name and password",
        "sort -u 'a:b', docker run -u '1000:1000' image, chown -u app:app",
        "ldapsearch -x -b 'dc=example,dc=com' and -b ou=people,dc=example",
        "grep -b pattern=x file; git checkout -b feature",
        "pip install -u https://h/x, -u 'http://host:8080/path'",
        '{"cookies": {"flour": "200 g", "sugar": "sweet"}, "bake": [1]}',
        "cookies = [1, 2, 3]; cookies: {flour, sugar 2}",
        '{"cookies": [{"name": "Oatmeal", "price": 3}]}',
        "Authorization: required. Authorization: Basic authentication is used, or a token",
        "authorization: none, Authorization: Bearer tokens are better, authorization: see section 4",
        "the --password option, --token. and --secret is needed, --password=<yours> --token $TOKEN",
        "the default password is long; a machine login page; password reset",
        "machine learning, login and password hygiene",
        "<password/> <password></password> <label>Password</label> <b>token</b>",
        '<input name="password" type="password" value=""/>',
        "name: token, and its value: yes",
        "The secret of the cookie is butter. A token of love: one word.",
        "pass: 120 of 130, first_pass = analyse(x), bypass: nothing1, compass: north1",
        "tokens.map(token => token.length), OLD_PWD=/home/somebody",
        "a password: 8-16 characters, password: <new1x>, password=$DB1P",
        "mysql -u root -p db -P3306; mkdir -pv a/b, /c?sig=1&design=2",
    ],
)
def test_what_only_looks_a_little_like_it_stays(text: str) -> None:
    assert redacted(text) == (text, {})


def test_only_what_was_asked_for_is_taken_out_and_is_counted_by_what_it_was() -> None:
    text = "ACME-123456 and ACME-654321 of a@b.example, 4111111111111111"
    assert redacted(text, ("emails",), ticket="ACME-[0-9]{6}") == (
        "[ticket] and [ticket] of [email], 4111111111111111",
        {"email": 1, "ticket": 2},
    )
    assert redacted(text, ()) == (text, {})


SECRET = st.from_regex(r"[A-Za-z]{2,12}[0-9]{2,4}[A-Za-z0-9]{2,12}", fullmatch=True)
HOLDERS = [
    "curl -u 'user:{}' h", "curl -su user:{} h", 'curl --user "user:{}" h', "curl -b 'session={}' h", "curl -b id={}",
    'Cookie: session="{}"; a=b', 'x: {{"Cookie": ["id={}", "b=c"]}}', "cookies={{'id': '{}'}}",
    "Authorization: Token {}", "Authorization: ApiKey {}", "authorization: Basic {}", '"Authorization": "Bot {}"',
    "--http-password {} x", "--proxy-password='{}'", "machine h login u password {}", "<password>{}</password>",
    "<my:api-key a='b'>{}</my:api-key>", '{{"password": "a\\"b{}"}}', "password: 'a\\'b{}'",
    '<add key="secret" value="{}"/>', '"name": "X_TOKEN", "value": "{}"',
]  # fmt: skip
"""How a secret stands in what people paste."""

WORDS = [
    "the", "a", "password", "token", "secret", "cookie", "cookies", "authorization", "basic", "bearer", "digest",
    "curl", "-u", "-b", "--user", "--cookie", "login", "default", "account", "key", "name", "value", "user", "is",
    "of", "and",
    "12", "3.5", "--verbose", "required,", "option.", "(see", "<b>", "it's", '"quoted"', "e.g.", "https://h:8080/a",
]  # fmt: skip


@given(st.sampled_from(HOLDERS), SECRET, st.sampled_from(["", "first, ", "first:\n"]))
def test_a_secret_is_taken_out_wherever_it_is_pasted_and_nothing_before_it(
    holder: str, secret: str, before: str
) -> None:
    text, counted = redacted(before + holder.format(secret))
    assert secret not in text
    assert text.startswith(before + holder[:4].replace("{{", "{"))
    assert counted == {"secret": 1}


@given(st.lists(st.sampled_from(WORDS), max_size=30))
def test_words_about_secrets_are_no_secrets(words: list[str]) -> None:
    text = " ".join(words)
    assert redacted(text) == (text, {})


@given(st.text(max_size=300))
def test_any_text_can_be_redacted_and_a_second_time_changes_no_card_or_address(text: str) -> None:
    once, _ = redacted(text, ("emails", "cards"))
    assert redacted(once, ("emails", "cards"))[0] == once


LONG = 100_000
"""Characters. What is quadratic takes tens of seconds then."""

BEGINNINGS = [
    "-----BEGIN PGP PRIVATE KEY BLOCK-----", "whsec_", "hvs.", "gsk_", "r8_", "nvapi-", "sbp_0", "AGE-SECRET-KEY-1",
    "mysql ", "mysql -", "mysql -p", "mysql -p'", "?sig=", "&sig=a", "_PASS=", "_pwd=", "pass: ", "pass=1", "pass:a",
    "password :=", "password =>", "password => '", 'password: ["', "password: |", "password: |\n ", "password: a1",
    "eyJ-", "eyJaaaaaaaaa.", "eyJaaaaaaaaa.aaaaaaaaa", "-----BEGIN ", "-----BEGIN A B C ",
    "-----BEGIN PRIVATE KEY-----", "-----BEGIN PRIVATE KEY----------END ", "sk-", "pk_a-", "ghp_", "github_pat_",
    "glpat-", "AKIA", "AIza", "ya29.", "GOCSPX-", "xoxb-", "xapp-", "hf_", "npm_", "pypi-", "SG.",
    "SG.aaaaaaaaaaaaaaaaaaaa.", "SK0", "shpat_", "dop_v1_", "dapi0", "mg_", "bearer ", "basic", "password",
    "password=", "password:", "password=,", "token = ;", 'password="', "secret='\\", 'password="\\\\', "api_key=\\",
    "://", "://a:", "://a:b", "://:@", "a", "a@", "a@b", "a@b.", "a@b.c", "a@b.c+", ".", "+", "%@a", "1", "1 ",
    "4111 ", "4111 1111 1111 1112 ", "3782 822463 ", "4111111111111111 ", "1-", " ", "-", "\\", '"', "é", "\n",
    "-u", "-u a:", "-u a", "--user ", "--password ", "--password", "12345678:", "12345678:AA", "1234567890:a-",
    "Cookie: ",
    "Cookie: a=", "cookie: a", "set-cookie:", "cookie", "M" + "a" * 24 + ".", "MaaaaaaaaaaaaaaaaaaaaaaaaN.aaaaaa.",
    "hooks.slack.com/services/T", "hooks.slack.com/services/Taaaaaaa/Baaaaaaa/", "4111.", "4111.1111.1111.", "4111  ",
    "4111 - ", "3782.822463.", "a'", "a'a@", '"a', '"a"@', '"a"@b.', "a@[", "a@[1.", "passwort", "passwort: ", "pwd=",
    "mot de passe ", "пароль:", "密码\uff1a", "authorization:", "Authorization: Basic ", "authorization: token a",
    "authorization: digest a=", 'Cookie: a="', 'cookie: a="b', 'Cookie: [ "a=', "cookies={'a': 'abcdef", "cookies: [",
    'cookies: [{"value":', "cookies: [{a", "-b ", "-b a=", "-b 'a=", '-sb "a=\\', "-ssssssu ", "-u 'a:", '-u "a:b\\',
    "--a-", "--a-b-c-password ", "--password=", "sshpass -p", "sshpass -p '", "machine ", "machine a login ",
    "machine a login b password", "default login a account b ", "<", "<a", "<a:", "<password", "<password ",
    "<password>", "<password>a<", "<token><![CDATA[",
    "name:", "name: password", "name: token value", "key=a", 'key="secret" value=',
    "name: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
]  # fmt: skip


@pytest.fixture(scope="module")
def most_cpu_s() -> float:
    """Many times what plain words of that length take. What backtracks would take minutes."""
    return 40 * cpu_s(("plain words, " * LONG)[:LONG]) + 0.2


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_no_beginning_of_a_form_takes_much_longer_than_plain_words(beginning: str, most_cpu_s: float) -> None:
    """While a pattern is matched nothing else of the proxy runs."""
    assert cpu_s((beginning * LONG)[:LONG] + "!") < most_cpu_s


@given(st.lists(st.sampled_from(BEGINNINGS), min_size=1, max_size=4), st.sampled_from(BEGINNINGS))
@settings(deadline=None, max_examples=8)
def test_no_mixture_of_beginnings_takes_much_longer_than_plain_words(
    most_cpu_s: float, mixture: list[str], repeated: str
) -> None:
    assert cpu_s(("".join(mixture) * LONG)[: LONG // 2] + (repeated * LONG)[: LONG // 2]) < most_cpu_s


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|aa)+$", "(.*)(.*)(.*)x", r"(\w+\s?)*!"])
def test_a_policys_own_pattern_cannot_backtrack(pattern: str, most_cpu_s: float) -> None:
    assert cpu_s("a" * LONG + "?", own=pattern) < most_cpu_s


@given(st.text(st.characters(), max_size=40), st.text(st.characters(), max_size=40))
def test_a_policys_own_pattern_is_found_in_any_text(before: str, after: str) -> None:
    found, counted = redacted(f"{before} Ärger-123456 {after}", (), ticket="(?i)ärger-[0-9]{6}")
    assert counted == {"ticket": 1}
    assert " [ticket] " in found


def cpu_s(text: str, **patterns: str) -> float:
    start_s = time.thread_time()
    redacted(text, **patterns)
    return time.thread_time() - start_s
