"""Random web addresses, e-mail addresses, numbers and emoji, assembled from parts so that few occur twice."""

import string
from collections.abc import Callable, Sequence
from typing import TypeVar

from numpy.random import Generator

_Option = TypeVar("_Option")

_SYLLABLES = (
    *("al", "an", "ar", "ba", "bel", "ber", "bo", "ca", "co", "da", "del", "den", "di", "do", "el", "en", "fa", "fi"),
    *("ga", "gen", "go", "ha", "hel", "in", "ja", "jo", "ka", "ker", "ko", "la", "lin", "lo", "ma", "mar", "mi", "mo"),
    *("na", "net", "ni", "no", "or", "pa", "per", "pi", "ra", "ri", "ro", "sa", "sen", "si", "so", "sta", "ta", "tech"),
    *("ter", "ti", "to", "tri", "va", "ver", "vi", "wa", "wi", "xa", "zen", "zo"),
)
_ENDINGS = (
    *("com", "com", "com", "org", "net", "de", "fr", "eu", "io", "co.uk", "info", "edu", "gov", "it", "es", "nl", "pl"),
    *("cz", "se", "at", "ch", "be", "ca", "com.au", "co.jp", "app", "dev"),
)
_PATH_WORDS = (
    *("index", "news", "about", "blog", "products", "shop", "search", "help", "docs", "en", "de", "article", "view"),
    *("images", "user", "login", "download", "wiki", "support", "contact", "watch", "item", "page", "events", "faq"),
)
_KEYS = ("id", "q", "page", "lang", "v", "ref", "utm_source", "user", "sort", "t", "session", "token")
_IDENTIFIER_CHARACTERS = string.ascii_letters + string.digits + "_-"
_FILE_TYPES = (".html", ".php", ".pdf", ".jpg", ".htm", ".aspx")
_FIRST_NAMES = (
    *("anna", "peter", "maria", "john", "lena", "paul", "sofia", "max", "laura", "david", "emma", "jan", "julia"),
    *("tom", "sara", "lukas", "nina", "marc", "eva", "felix", "info", "office", "contact", "support", "sales", "press"),
)
_EMOJI = (
    *"😀😃😄😁😆😅😂🤣🙂🙃😉😊😇🥰😍🤩😘😋😜🤪🤗🤔🤐😐😏🙄😬😌😔😴😷🤒🥳😎🤓😕😟😮😲😳🥺😢😭😱😖😞😓😩😤😡😠🤬💀💩👻👽🤖🙈🙉🙊",
    *"💋💔💕💖💙💚💛💜🖤💯💥💪👍👎👌👏🙌🙏👋🤝👉👇🔥✨⭐🌟🎉🎊🎁🎂🎈🏆⚽🏀🎵🎶📷📱💻📧📞📅📌✅❌❓❗🌈🌍🌹🌸🌲🍀🍕🍺☕🍷",
    *"🚗🚀🏠🐶🐱🐻🐼🦊🦁🐸🐵🐔🦄",
    # Several code points each: variants, skin tones, joined emoji and flags.
    *("❤️", "✌️", "⚠️", "➡️", "☀️", "✈️", "👍🏽", "🙏🏻", "👩‍💻", "🤷‍♀️", "🇩🇪", "🇫🇷", "🇬🇧", "🇺🇸", "🇪🇺"),
)


def web_address(random: Generator) -> str:
    """Return an address such as `https://www.manober.co.uk/news/4082.html?page=7` or `www.kado.eu`."""
    draw, *_ = draws = random.random(4).tolist()
    start = _choice(("https://", "https://", "https://www.", "http://", "www.", "www."), random)
    path = "".join(f"/{_path_word(random)}" for _ in range(int(draws[1] * 4)))
    if path and draws[2] < 0.25:
        path += _choice(_FILE_TYPES, random)
    elif draws[2] > 0.7:
        path += "/"
    query = ""
    if draws[3] < 0.3:
        query = "?" + "&".join(f"{_choice(_KEYS, random)}={_value(random)}" for _ in range(1 + int(draws[3] * 10)))
    return start + _domain(random) + path + query + (f"#{_name(random)}" if draw > 0.95 else "")


def email_address(random: Generator) -> str:
    """Return an address such as `anna.belko@mato.de`, `j_sen82@gola.org` or `sales@xaver.com`."""
    draw = random.random()
    name = _choice(_FIRST_NAMES, random)
    if draw < 0.5:
        name += _choice(".._-", random) + _name(random)
    elif draw < 0.65:
        name = name[0] + _choice(("", ".", "_"), random) + _name(random)
    if 0.4 < draw < 0.75:
        name += _digits(1 + int(random.random() * 4), random)
    return f"{name}@{_domain(random)}"


def number(random: Generator) -> str:
    """Return a count, an amount, a time, a date, a version or a telephone number."""
    return _choice(_NUMBERS, random)(random)


def emoji(random: Generator) -> str:
    """Return one emoji, or in three of ten cases two or three, alike or not."""
    draw = random.random()
    first = _choice(_EMOJI, random)
    if draw < 0.7:
        return first
    if draw < 0.85:
        return first * (2 + int(random.random() * 2))
    return first + _choice(_EMOJI, random)


def _grouped(random: Generator) -> str:
    """Return a count of four to nine digits with commas, and sometimes decimals: `1,234.56`."""
    count = f"{int(10 ** (3 + random.random() * 6)):,}"
    return count if random.random() < 0.5 else f"{count}.{_digits(2, random)}"


def _plain(random: Generator) -> str:
    return str(int(10 ** (random.random() * 7)))


def _decimal(random: Generator) -> str:
    return f"{int(10 ** (random.random() * 3))}.{_digits(1 + int(random.random() * 3), random)}"


def _amount(random: Generator) -> str:
    amount = f"{int(10 ** (random.random() * 4)):,}.{_digits(2, random)}"
    return _choice(("$", "€", "£"), random) + amount if random.random() < 0.5 else f"{_decimal(random)}%"


def _time(random: Generator) -> str:
    time = f"{int(random.random() * 24):02}:{int(random.random() * 60):02}"
    return time if random.random() < 0.8 else f"{time}:{int(random.random() * 60):02}"


def _date(random: Generator) -> str:
    day, month, year = (first + int(random.random() * n) for first, n in ((1, 28), (1, 12), (1950, 100)))
    form = _choice(("{2}-{1:02}-{0:02}", "{0:02}.{1:02}.{2}", "{1}/{0}/{2}"), random)
    return form.format(day, month, year)


def _telephone(random: Generator) -> str:
    """Return a number such as `+49 30 1234567`, `(030) 123-4567` or `555-0123`."""
    form = _choice(
        ("+{}{} {}{} {}{}{}{}{}{}{}", "({}{}{}) {}{}{}-{}{}{}{}", "0{}{}{} {}{}{}{}{}{}", "{}{}{}-{}{}{}{}"), random
    )
    return form.format(*_digits(11, random))


def _version(random: Generator) -> str:
    return ".".join(str(int(random.random() * n)) for n in (10, 20, 30))


_NUMBERS: tuple[Callable[[Generator], str], ...] = (
    *(_grouped, _grouped, _plain, _decimal, _amount, _time, _date, _telephone, _version),
)


def _choice(options: Sequence[_Option], random: Generator) -> _Option:
    # A tenth of the time of `random.choice`.
    return options[int(random.random() * len(options))]


def _digits(count: int, random: Generator) -> str:
    return f"{int(random.random() * 10**count):0{count}}"


def _name(random: Generator) -> str:
    """Return a word of two to four syllables."""
    return "".join(
        _SYLLABLES[int(draw * len(_SYLLABLES))] for draw in random.random(2 + int(random.random() * 3)).tolist()
    )


def _domain(random: Generator) -> str:
    draw = random.random()
    name = _name(random) if draw < 0.8 else f"{_name(random)}-{_name(random)}"
    return f"{name}{_digits(1 + (draw > 0.75), random) if 0.7 < draw < 0.8 else ''}.{_choice(_ENDINGS, random)}"


def _path_word(random: Generator) -> str:
    draw = random.random()
    if draw < 0.4:
        return _choice(_PATH_WORDS, random)
    if draw < 0.6:
        return _digits(1 + int(random.random() * 7), random)
    if draw < 0.75:
        return _identifier(random)
    return "-".join(_name(random) for _ in range(1 + int(random.random() * 3)))


def _value(random: Generator) -> str:
    draw = random.random()
    if draw < 0.4:
        return _digits(1 + int(random.random() * 6), random)
    if draw < 0.7:
        return _name(random)
    return _identifier(random) if draw < 0.9 else f"{_name(random)}+{_name(random)}"


def _identifier(random: Generator) -> str:
    """Return five to twelve letters and digits, as in the addresses of videos."""
    draws = random.random(5 + int(random.random() * 8)).tolist()
    return "".join(_IDENTIFIER_CHARACTERS[int(draw * len(_IDENTIFIER_CHARACTERS))] for draw in draws)
