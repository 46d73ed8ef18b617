"""What is taken out of captured text before it is written: secrets, e-mail addresses, card numbers, the policy's own
patterns.

Owns the forms of these. Each is found by how it is usually written, so this keeps accidents out of a file, and nobody
who tries. Forms of keys are those that the services publish for secret scanning.

Clients choose these texts, and while a pattern is matched no other thread runs. So each takes time in proportion to any
text: what repeats without a bound does so where no second match can begin inside it, and gives nothing back (``++``);
the policy's own patterns are RE2's.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from guard.linear_pattern import linear_pattern

SECRETS = re.compile(
    r"""
      -----BEGIN[ ](?:[A-Z0-9]{1,20}[ ]){0,3}PRIVATE[ ]KEY(?:[ ]BLOCK)?-----
      [\s\S]*?(?:-----END[ ][A-Z0-9 ]{0,40}-----|\Z)
    | \b(?:sk|pk|rk)[-_][A-Za-z0-9_\-]{16,}+               # OpenAI, Anthropic, Stripe
    | \bgh[pousr]_[A-Za-z0-9]{30,}+ | \bgithub_pat_\w{22,}+
    | \bgl(?:pat|rt|dt)-[\w\-]{20,}+                        # GitLab
    | \b(?:AKIA|ASIA)[0-9A-Z]{16}\b                         # AWS
    | \bAIza[0-9A-Za-z_\-]{35} | \bya29\.[\w\-]{20,}+ | \bGOCSPX-[\w\-]{20,}+   # Google
    | \bxox[abeoprs]-[A-Za-z0-9\-]{10,}+ | \bxapp-[A-Za-z0-9\-]{10,}+           # Slack
    | \bhf_[A-Za-z0-9]{30,}+ | \bnpm_[A-Za-z0-9]{36} | \bpypi-[\w\-]{32,}+
    | \bSG\.[\w\-]{16,64}+\.[\w\-]{32,}+                    # SendGrid
    | \bwhsec_[A-Za-z0-9+/=]{16,}+                          # Stripe's, and others', of webhooks
    | \bhv[sbr]\.[\w\-]{20,}+                              # HashiCorp Vault
    | \bgsk_[A-Za-z0-9]{20,}+ | \br8_[A-Za-z0-9]{30,}+ | \bnvapi-[\w\-]{20,}+   # Groq, Replicate, NVIDIA
    | \bsbp_[0-9a-f]{40} | \bAGE-SECRET-KEY-1[0-9A-Z]{50,}+
    | \bSK[0-9a-f]{32}\b                                    # Twilio
    | (?<!\d)\d{8,10}:[A-Za-z0-9_\-]{35}(?![\w\-])          # Telegram
    | \b[MNO][A-Za-z0-9]{23,27}\.[\w\-]{6}\.[\w\-]{27,}+    # Discord
    | \bhooks\.slack\.com/services/T\w{6,20}/B\w{6,20}/\w{16,}+
    | \bshp(?:at|ca|pa|ss)_[0-9a-fA-F]{32} | \bdo[opr]_v1_[0-9a-f]{64} | \bdapi[0-9a-f]{32}
    | \bmg_[A-Za-z0-9_\-]{43}                               # the guard's own keys
    | (?<![\w\-])eyJ[\w\-]{8,}+\.[\w\-]{8,}+\.[\w\-]*+      # JSON web tokens
    """,
    re.VERBOSE,
)
NAMES = (
    r"(?:password|passwd|passphrase|passcode|secret|token|"
    r"(?:api|access|account|private|secret|signing)[_\-]?key)"
)
SCHEMES = (
    r"(?:bearer|basic|token|api[_\-]?key|key|jwt|oauth|bot|negotiate|ntlm|hmac|hawk|splunk|"
    r"genie-?key|sso-key|sharedkey)"
)
NO_VALUE = (
    r"(?!(?:a|also|an|and|are|argument|as|at|auth|authentication|authorization|based|be|because|but|by|can|credentials?|"
    r"did|disabled|do|does|enabled|field|file|flag|for|from|given|has|have|header|here|if|in|instead|into|is|it|its|key|"
    r"may|means|must|needs?|no|none|not|of|on|only|option|options|or|parameter|requires?|required|scheme|sets?|should|"
    r"so|switch|takes?|than|that|the|then|they|this|to|token|type|unless|using|value|via|was|we|were|when|where|which|"
    r"while|will|with|without|works?|would|yes|you|your)(?![\w~+/=\-]|\.\w))"
)
"""What stands behind such names where they are only talked about."""

SAYS = r"\\{0,4}[\"']?\s{0,3}[:=]\s{0,3}"
"""Between a name, which may be quoted, and its value."""

NAMED_SECRETS = re.compile(
    rf"""(?ix)
    ( \b(?:bearer|basic)[ ]{{1,8}}+(?=[\w.~+/=\-]{{16}}) )
    ( [^\s"',;\\]++ )
    |   # a header: what looks random, or ends with the header
    ( \bauthorization\\{{0,4}}["']?\s{{0,3}}[:=,]\s{{0,3}}\\{{0,4}}["']?
      (?: {SCHEMES}[ ]{{1,8}}+ {NO_VALUE}
          (?: (?=[\w.~+/=\-]{{0,64}}(?:\d|=)) | (?=[\w.~+/\-]{{0,64}}(?-i:[a-z][A-Z]))
            | (?=\w{{3,64}}+\s{{0,9}}(?:["'\\]|\Z)) )
        | (?=[\w.~+/=\-]{{16}})(?=[a-z_.~+/=\-]{{0,64}}\d) ) )
    ( [^\s"',;\\]++ )
    |
    ( \bauthorization\\{{0,4}}["']?\s{{0,3}}[:=,]\s{{0,3}}\\{{0,4}}["']?digest[ ]{{1,8}}+(?=\w{{1,20}}=) )
    ( [^\r\n']++ )
    |   # a header with cookies; one cookie's value may be quoted
    ( \b(?:set-)?cookie2?\\{{0,4}}["']?\s{{0,3}}[:=,]\s{{0,3}}\\{{0,4}}["']?(?=[\w.\-]{{1,64}}=) )
    ( (?: [^\r\n"'\\] | (?<==)\\{{0,4}}"[^"\\\r\n]*+\\{{0,4}}" ){{4,}}+ )
    |   # lists of them
    ( \b(?:set-)?cookies?{SAYS}[\[(]\s{{0,40}}+(?=\\{{0,4}}["'][\w.\-]{{1,64}}=) )
    ( (?:"[^"]*+"|'[^']*+'|[^\])"'])++ )
    |   # objects: a name and something random, or one with a name and a value for each
    ( \bcookies?{SAYS}(?:dict\(|\{{)\s{{0,40}}+
      (?=\\{{0,4}}["']?[\w.\-]{{1,64}}{SAYS}\\{{0,4}}["'](?=[^\s"'\\]{{6}})[^\s"'\\\d]{{0,64}}\d) )
    ( (?:"[^"]*+"|'[^']*+'|[^}})"'])++ )
    |
    ( \bcookies?{SAYS}\[\s{{0,40}}+(?=\{{[^\]]{{0,400}}["']value\\{{0,4}}["']\s{{0,3}}:) )
    ( (?:"[^"]*+"|'[^']*+'|[^\]"'])++ )
    |   # options of programs; -b of ldapsearch has names of folders
    ( (?<![\w\-])(?:-[sSkLvifgGIOjJNqRZ]{{0,6}}b|--cookie)[ =]{{1,3}}(?!["']?(?:dc|ou|cn|o|uid|c)=) )
    ( '[\w.\-]{{1,64}}+=[^'\r\n]++'? | "[\w.\-]{{1,64}}+=(?:[^"\\\r\n]|\\[^\r\n])++"?
      | [\w.\-]{{1,64}}+=[^\s"']{{3,}}+ )
    |
    ( (?<![\w\-])(?:-[sSkLvifgGIOjJNqRZ]{{0,6}}u|--user|--proxy-user)[ =]{{0,3}} )
    (?: ( '[^\s:"']{{1,64}}+:(?!//) ) ( (?!\d{{1,16}}') [^'\r\n]{{2,}}+ )
      | ( "[^\s:"']{{1,64}}+:(?!//) ) ( (?!\d{{1,16}}") (?:[^"\\\r\n]|\\[^\r\n]){{2,}}+ )
      | ( [^\s:"']{{1,64}}+:(?!//) ) ( (?!\d{{1,16}}(?:\s|\Z)) [^\s"']{{4,}}+ ) )   # of docker, -u has numbers
    |
    ( (?<![\w\-])--(?:[a-z]{{1,20}}-){{0,3}}(?:password|passwd|passphrase|token|secret|api-key)(?:[ ]{{1,3}}|=)
      (?=["']?[^\s"'\-<$]){NO_VALUE} )
    ( '[^'\r\n]++'? | "(?:[^"\\\r\n]|\\[^\r\n])++"? | [^\s"',;]++ )
    |
    ( \bsshpass[ ]{{1,3}}-p[ ]{{0,3}} )
    ( '[^'\r\n]++'? | "(?:[^"\\\r\n]|\\[^\r\n])++"? | [^\s"']++ )
    |   # -P is the port
    ( \bmysql(?:dump|admin|import|check|show)?\s[^\r\n|;&]{{0,99}}?(?<=\s)(?-i:-p)(?=[^\s\-]) )
    ( '[^'\r\n]++'? | "(?:[^"\\\r\n]|\\[^\r\n])++"? | [^\s"']++ )
    |   # an address that is signed (Azure)
    ( [?&](?:amp;)?sig= )
    ( [\w%+/=\-]{{16,}}+ )
    |   # a line of .netrc
    ( \b(?:machine\s{{1,9}}+[^\s,;]{{1,255}}+|default)\s{{1,9}}+login\s{{1,9}}+(?!and\s|or\s)\S{{1,255}}+\s{{1,9}}+
      (?:account\s{{1,9}}+\S{{1,255}}+\s{{1,9}}+)?+password\s{{1,9}}+ )
    ( \S++ )
    |   # an element
    ( <(?:[\w.\-]{{1,40}}:)?[\w.\-]{{0,40}}?(?:{NAMES}|pwd)(?:\s[^<>]{{0,200}})?>(?:<!\[CDATA\[)? (?=\s{{0,99}}[^\s<]) )
    ( (?:[^<\]]|\](?!\]>))++ ) (?=(?:\]\]>)?</)
    |   # a name and a value that say so
    ( \b(?:key|name){SAYS}\\{{0,4}}["']?[\w.:\-]{{0,60}}{NAMES}\\{{0,4}}["']?[\s,]{{1,40}}+
      \\{{0,4}}["']?value{SAYS}\\{{0,4}}["']? )
    ( [^\s"'<>,\\]{{4,}}+ )
    |
    ( (?:{NAMES}
        |(?:\b|(?<=_))pwd(?=["']?\s?[:=]\s?["']?[^\s/"'$])   # and not the folder that one is in
        |(?<=_)(?-i:PASS)(?=["']?[:=]["']?[^\s/"'$])
        |(?<![a-z0-9])pass(?=["']?\s?[:=]\s?["']?(?=[^\s"'/$]{{0,64}}\d)[^\s"'/$\d]{{0,9}}[a-z])   # and no count
        |passwort|kennwort|mot[ ]de[ ]passe|contrase[ñn]a|senha|wachtwoord|l[öo]senord|adgangskode|passord|salasana
        |has[łl]o|heslo|parola|jelsz[óo]|[şs]ifre|пароль|密码|密碼|パスワード|비밀번호)
      \\{{0,4}}["']?\s{{0,3}}(?::=|=>(?=\s{{0,3}}["'])|[:=\uff1a])\s{{0,3}}
      (?: \[\s{{0,9}}(?=["']) | [|>][+\-]?[ \t]{{0,3}}\r?\n[ \t]{{1,40}} )? )   # in a list, or a block of YAML
    (?: ( " ) ( (?:[^"\\\r\n]|\\[^\r\n]){{6,}}+ )
      | ( ' ) ( (?:[^'\\\r\n]|\\[^\r\n]){{6,}}+ )
      | ( \\{{1,4}}" ) ( (?:\\\\\\"|[^"\\\r\n]|\\(?!\\{{0,3}}")){{6,}}+ )
      | ( \\{{1,4}}' ) ( (?:\\\\\\'|[^'\\\r\n]|\\(?!\\{{0,3}}')){{6,}}+ )
      | (?!<[\w\-]{{1,40}}>)(?=(?:[,;]{{0,3}}[^\s"',;]){{6}})
        ( (?:[,;]{{0,3}}(?:[^\s"',;\\]|\\(?!["'])))++ )
    )
    |   # short ones, where nothing else is meant
    ( (?:password|passwd|passphrase|passcode|passwort|kennwort)\\{{0,4}}["']?\s{{0,3}}[:=\uff1a]\s{{0,3}}["']? )
    ( (?![<$])(?=[^\s"',;\\]{{0,5}}\d)[^\s"',;\\]{{5,}}+ )
    |
    ( ://[^\s/:]{{0,64}}+: )
    ( [^\s/"']+ ) (?=@)
    """
)
"""A value behind what says that it is one: to the end of its quotation, or of what has no space in it, so that
of several words without quotes the first goes: where a sentence would begin again nothing says. In an address
that is to the last ``@`` before the path."""

EMAILS = re.compile(
    r"""(?x)
    (?: (?<![\w.+%\-]) [\w.+%\-]++ (?:'[\w.+%\-]++)?+ | "(?:[^"\\\r\n]|\\[^\r\n]){1,64}+" )
    @ (?: [\w\-]++(?:\.[\w\-]++)++ | \[[0-9A-Fa-f:.]{2,45}\] )
    (?: [\w.+%\-]*+ @[\w\-]++(?:\.[\w\-]++)++ )*+    # one right behind the other
    """
)

DIGITS = re.compile(r"\d(?:[ \-\u00a0]?\d)++")
SPACED_CARD = re.compile(
    r"""(?x)
    (?<!\d) \d{4}
    (?P<space> [./_,:·•\t\u2009\u2010-\u2015\u202f] | [ ]{2,3} | [ ][.\-\u2013][ ] )
    (?: \d{4} (?P=space) \d{4} (?P=space) \d{4} | \d{6} (?P=space) \d{4,5} ) (?!\d)
    """
)
"""Cards whose groups have another sign between them. Only in these forms: other numbers have such signs, too."""

GROUP = re.compile(r"\d+")
CARD_GROUPS = ((4, 4, 4, 4), (4, 6, 5), (4, 6, 4), (4, 4, 4, 4, 3), *((length,) for length in range(13, 20)))
"""How the digits of a card's number are grouped, where other digits stand beside it."""

CARD_DIGITS = range(13, 20)

Redact = Callable[[str, Counter[str]], str]
"""A text without what is to be taken out; how often is counted by what it was."""


def redaction(names: Sequence[str], patterns: Mapping[str, str]) -> Redact:
    """``names``: of ``secrets``, ``emails`` and ``cards``; ``patterns``: name to regular expression."""
    own = [(name, linear_pattern(pattern)) for name, pattern in patterns.items()]

    def redact(text: str, counted: Counter[str]) -> str:
        if "secrets" in names:
            text = _each(SECRETS, "secret", text, counted)
            text = NAMED_SECRETS.sub(lambda found: _without_value(found, counted), text)
        if "emails" in names:
            text = _each(EMAILS, "email", text, counted)
        if "cards" in names:
            text = SPACED_CARD.sub(lambda found: _without_card(found[0], counted), text)
            text = DIGITS.sub(lambda found: _without_cards(found[0], counted), text)
        if own:
            text = _unicode(text)
        for name, pattern in own:
            text = _each(pattern, name, text, counted)
        return text

    return redact


def _each(pattern: re.Pattern[str], name: str, text: str, counted: Counter[str]) -> str:
    return pattern.sub(lambda _found: _count(name, counted), text)


def _unicode(text: str) -> str:
    """The text without halves of surrogate pairs, which JSON can spell, and RE2, which reads UTF-8, cannot take."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _count(name: str, counted: Counter[str]) -> str:
    counted[name] += 1
    return f"[{name}]"


def _without_value(found: re.Match[str], counted: Counter[str]) -> str:
    """The last group is the value; the others are what says so."""
    *before, _value = (group for group in found.groups() if group is not None)
    return "".join(before) + _count("secret", counted)


def _without_card(number: str, counted: Counter[str]) -> str:
    return _count("card", counted) if _checks(number) else number


def _without_cards(digits: str, counted: Counter[str]) -> str:
    """Of digits with at most one space or hyphen between them: cards by their groups, or all of it."""
    groups = [(one.start(), one.end()) for one in GROUP.finditer(digits)]
    lengths = tuple(end - start for start, end in groups)
    if sum(lengths) in CARD_DIGITS and _checks(digits):
        return _count("card", counted)
    parts, done, at = [], 0, 0
    while at < len(groups):
        size = next((len(form) for form in CARD_GROUPS if _is_card(digits, groups, lengths, at, form)), 0)
        if size:
            parts += [digits[done : groups[at][0]], _count("card", counted)]
            done = groups[at + size - 1][1]
        at += size or 1
    return "".join(parts) + digits[done:]


def _is_card(
    digits: str, groups: Sequence[tuple[int, int]], lengths: tuple[int, ...], at: int, form: tuple[int, ...]
) -> bool:
    """Whether the groups from ``at`` on have this form, and the right check digit."""
    if lengths[at : at + len(form)] != form:
        return False
    return _checks(digits[groups[at][0] : groups[at + len(form) - 1][1]])


def _checks(number: str) -> bool:
    """Whether the check digit of a card's number is right (Luhn; ISO/IEC 7812-1, annex B)."""
    digits = [int(one) for one in number if one.isdecimal()]
    doubled = [digit if i % 2 == 0 else sum(divmod(2 * digit, 10)) for i, digit in enumerate(reversed(digits))]
    return sum(doubled) % 10 == 0
