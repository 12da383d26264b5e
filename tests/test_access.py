"""Who a request comes from and what the rules make of it, above all where somebody lies."""

import time
from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uvimg.core.access import find_client, is_cross_site, parse_network, parse_rules

PROXIES = [parse_network("10.0.0.0/24"), parse_network("fd00::/8")]


@pytest.mark.parametrize(
    ("rules", "client", "allowed"),
    [
        ("allow all", "1.2.3.4", True),
        ("", "1.2.3.4", False),
        (" ; allow 1.2.3.4 ; ", "1.2.3.4", True),
        ("allow 1.2.3.4", "1.2.3.5", False),
        ("allow 1.2.3.77/24", "1.2.3.4", True),
        ("allow 1.2.3.0/255.255.255.0", "1.2.3.4", True),
        # The first rule that matches decides.
        ("deny 1.2.3.4; allow all", "1.2.3.4", False),
        ("allow all; deny 1.2.3.4", "1.2.3.4", True),
        ("deny 1.2.3.4; allow 1.2.3.0/24; deny all", "1.2.3.9", True),
        ("allow ::1", "::1", True),
        ("allow 2001:db8::/32", "2001:db8:1::9", True),
        ("allow 2001:db8::/32", "1.2.3.4", False),
        ("allow 0.0.0.0/0", "2001:db8::1", False),
        # One address, whichever way the socket or the rule writes it.
        ("allow 127.0.0.1", "::ffff:127.0.0.1", True),
        ("deny ::ffff:1.2.3.4; allow all", "1.2.3.4", False),
        ("deny ::ffff:1.2.3.0/120; allow all", "::ffff:1.2.3.4", False),
        ("allow 127.0.0.1", "::127.0.0.1", False),
    ],
)
def test_the_first_rule_that_matches_decides(rules: str, client: str, allowed: bool) -> None:
    assert parse_rules(rules).allows(find_client(client, {}, ())) is allowed


@pytest.mark.parametrize(
    ("rules", "allowed"),
    [
        ("allow all", True),
        ("allow 1.2.3.4; allow all", True),
        ("deny 1.2.3.4; allow all", False),
        ("allow 127.0.0.1", False),
        ("allow 0.0.0.0/0; allow ::/0", False),
    ],
)
def test_a_client_nobody_vouches_for_may_be_the_denied_one(rules: str, allowed: bool) -> None:
    assert parse_rules(rules).allows(None) is allowed


@pytest.mark.parametrize(
    "text",
    [
        "permit all",
        "allow",
        "allow 1.2.3.4 5.6.7.8",
        "allow 1.2.3",
        "allow 1.2.3.4/33",
        "allow fe80::1%eth0",
        "allow ٣",
    ],
)
def test_what_is_no_rule_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not an? (rule|address)"):
        parse_rules(text)


@pytest.mark.parametrize(
    ("peer", "headers", "client"),
    [
        ("9.9.9.9", {}, "9.9.9.9"),
        ("::ffff:9.9.9.9", {}, "9.9.9.9"),
        ("fe80::1%eth0", {}, "fe80::1"),
        ("", {}, None),
        # From a stranger: an unknown proxy, or a liar.
        ("9.9.9.9", {"x-forwarded-for": "127.0.0.1"}, None),
        ("127.0.0.1", {"x-forwarded-for": "127.0.0.1"}, None),
        ("9.9.9.9", {"forwarded": "for=127.0.0.1"}, None),
        ("9.9.9.9", {"forwarded": ""}, None),
        ("9.9.9.9", {"x-forwarded-for": ""}, None),
        # From a proxy: what it wrote itself, which is the last that is not another proxy's.
        ("10.0.0.1", {"x-forwarded-for": "9.9.9.9"}, "9.9.9.9"),
        ("10.0.0.1", {"x-forwarded-for": "127.0.0.1, 9.9.9.9"}, "9.9.9.9"),
        ("10.0.0.1", {"x-forwarded-for": "127.0.0.1, 9.9.9.9, 10.0.0.7"}, "9.9.9.9"),
        ("10.0.0.1", {"x-forwarded-for": "127.0.0.1, nonsense"}, None),
        ("10.0.0.1", {"x-forwarded-for": "127.0.0.1,"}, None),
        ("10.0.0.1", {"x-forwarded-for": "9.9.9.9:1234"}, "9.9.9.9"),
        ("10.0.0.1", {"x-forwarded-for": "2001:db8::1"}, "2001:db8::1"),
        ("10.0.0.1", {"x-forwarded-for": "[2001:db8::1]:99"}, "2001:db8::1"),
        ("fd00::1", {"x-forwarded-for": "::ffff:9.9.9.9"}, "9.9.9.9"),
        ("::ffff:10.0.0.1", {"x-forwarded-for": "9.9.9.9"}, "9.9.9.9"),
        ("10.0.0.1", {"x-forwarded-for": "10.0.0.2"}, "10.0.0.2"),
        ("10.0.0.1", {"x-forwarded-for": "127.0.0.1", "forwarded": "for=9.9.9.9"}, None),
        ("10.0.0.1", {"forwarded": "for=127.0.0.1, For=9.9.9.9;proto=https"}, "9.9.9.9"),
        ("10.0.0.1", {"forwarded": 'proto=http;for="[2001:db8::1]:4711"'}, "2001:db8::1"),
        ("10.0.0.1", {"forwarded": "for=unknown"}, None),
        ("10.0.0.1", {"forwarded": "for=_hidden"}, None),
        # The proxy's element names nobody: what stands before it is the client's own.
        ("10.0.0.1", {"forwarded": "for=127.0.0.1, by=10.0.0.1"}, None),
        ("10.0.0.1", {"forwarded": "for=9.9.9.9;for=127.0.0.1"}, None),
        # A Host or a quote of the client's, quoted or swallowed by what the proxy appends.
        ("10.0.0.1", {"forwarded": 'for=9.9.9.9;host="a;for=127.0.0.1"'}, "9.9.9.9"),
        ("10.0.0.1", {"forwarded": 'for=9.9.9.9;host="a, for=127.0.0.1"'}, "9.9.9.9"),
        ("10.0.0.1", {"forwarded": 'for=127.0.0.1;x=", for=9.9.9.9'}, None),
        ("10.0.0.1", {"forwarded": 'for=127.0.0.1;x=", for="[2001:db8::1]"'}, None),
        ("10.0.0.1", {"forwarded": r'for=127.0.0.1;x="\", for="[2001:db8::1]"'}, None),
    ],
)
def test_only_a_proxy_says_where_a_request_comes_from(peer: str, headers: dict[str, str], client: str | None) -> None:
    assert find_client(peer, headers, PROXIES) == (client and ip_address(client))


@given(st.text(alphabet='for=by;,"\\ 127.0.0.1[]:%_a', max_size=80), st.sampled_from(["forwarded", "x-forwarded-for"]))
def test_what_a_client_wrote_before_the_proxys_word_never_counts(lie: str, field: str) -> None:
    word = "for=9.9.9.9" if field == "forwarded" else "9.9.9.9"
    assert find_client("10.0.0.1", {field: f"{lie}, {word}"}, PROXIES) in (None, ip_address("9.9.9.9"))


@pytest.mark.parametrize(
    "field",
    ["a=b;" * 8000 + "for=1;" * 8000, "for=10.0.0.1," * 5000, 'for="' * 16_000, "10.0.0.1," * 7000, " " * 65_536],
)
def test_a_header_as_long_as_it_can_be_costs_little(field: str) -> None:
    started = time.process_time()
    find_client("10.0.0.1", {"forwarded": field}, PROXIES)
    find_client("10.0.0.1", {"x-forwarded-for": field}, PROXIES)
    assert time.process_time() - started < 1


@given(st.ip_addresses(v=4), st.integers(0, 32))
def test_a_mapped_network_is_the_ipv4_network_within(address: object, bits: int) -> None:
    plain = ip_network((str(address), bits), strict=False)
    assert parse_network(f"::ffff:{address}/{96 + bits}") == parse_network(f"{address}/{bits}") == plain


@pytest.mark.parametrize(
    ("headers", "cross"),
    [
        ({}, False),
        ({"sec-fetch-site": "none"}, False),
        ({"sec-fetch-site": "same-origin"}, False),
        ({"sec-fetch-site": "same-site"}, True),
        ({"sec-fetch-site": "cross-site"}, True),
        ({"sec-fetch-site": "none, cross-site"}, True),
        ({"sec-fetch-site": "cross-site", "origin": "http://img", "host": "img"}, True),
        # Behind a proxy that rewrites Host.
        ({"sec-fetch-site": "same-origin", "origin": "https://img.example", "host": "127.0.0.1:4869"}, False),
        ({"origin": "http://img:4869", "host": "img:4869"}, False),
        ({"origin": "http://img:4869", "host": "IMG:4869"}, False),
        ({"origin": "http://img:4869", "host": "img"}, True),
        ({"origin": "http://evil", "host": "img"}, True),
        ({"origin": "http://img@evil", "host": "img"}, True),
        ({"origin": "null", "host": "img"}, True),
        ({"origin": "null"}, True),
        ({"origin": "", "host": "img"}, True),
        ({"origin": "http://[", "host": "img"}, True),
    ],
)
def test_another_site_is_told_from_ones_own(headers: dict[str, str], cross: bool) -> None:
    assert is_cross_site(headers) is cross
