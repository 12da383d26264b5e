"""Who may do what: address rules, and whose word counts on where a request came from.

zimg's notation, `allow|deny <address|address/mask|all>` joined by `;`, with the documented meaning:
the first rule that matches decides, and where none matches nobody may. (zimg itself read them last to
first, knew IPv4 only and believed X-Forwarded-For from anybody.)
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


@dataclass(frozen=True, slots=True)
class AccessRules:
    """Parsed access rules, in order: (allowed, network); a network of None is everybody."""

    rules: tuple[tuple[bool, Network | None], ...]

    def allows(self, client: Address | None) -> bool:
        """Whether the first rule that matches lets `client` in. None is a client nobody can vouch for."""
        for allowed, network in self.rules:
            if network is None or (client is not None and client in network):
                return allowed
        return False

    @property
    def allows_everybody(self) -> bool:
        return bool(self.rules) and self.rules[0] == (True, None)


def parse_rules(text: str) -> AccessRules:
    """Rules from zimg's notation. ValueError with a sentence when it is none."""
    rules: list[tuple[bool, Network | None]] = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        match part.split():
            case ["allow" | "deny" as verb, "all"]:
                rules.append((verb == "allow", None))
            case ["allow" | "deny" as verb, address]:
                rules.append((verb == "allow", parse_network(address)))
            case _:
                raise ValueError(f"'{part}' is not a rule: write allow or deny, then an address, address/mask or all")
    return AccessRules(tuple(rules))


def parse_network(text: str) -> Network:
    """An address or network, IPv4 or IPv6. ValueError with a sentence when it is none."""
    try:
        return ip_network(text, strict=False)
    except ValueError:
        raise ValueError(f"'{text}' is not an address or address/mask") from None


def find_client(peer: str, headers: Mapping[str, str], trusted: Sequence[Network]) -> Address | None:
    """The address that a request really comes from, None when nobody can vouch for it.

    Only a trusted proxy's X-Forwarded-For or Forwarded (RFC 7239) is read, from the right, past the
    trusted ones: everything further left was written by the client. A forwarding header from anybody else
    means an unknown proxy stands between, so the peer's own address says nothing about the client:
    else every client of an nginx on the same machine would count as loopback.
    """
    forwarded = _forwarded(headers)
    client = _parse_address(peer)
    while forwarded:
        if client is None or not any(client in network for network in trusted):
            return None
        client = _parse_address(forwarded.pop())
        if client is None or not any(client in network for network in trusted):
            return client
    return client


def is_cross_site(headers: Mapping[str, str]) -> bool:
    """Whether a browser says that another site made this request (Fetch Metadata; Origin in older ones)."""
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return True
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != headers.get("host", "")


_FOR = re.compile(r'(?:^|[;,\s])for\s*=\s*("[^"]*"|[^;,\s]*)', re.IGNORECASE)


def _forwarded(headers: Mapping[str, str]) -> list[str]:
    """The chain of addresses that proxies wrote down, nearest last; "" for one that nobody can read.

    A proxy writes one of the two fields and passes the other on as the client sent it, so where both
    are there, neither is believed.
    """
    chain, element = headers.get("x-forwarded-for"), headers.get("forwarded")
    if chain is not None and element is not None:
        return [""]
    if chain is not None:
        return [part.strip() for part in chain.split(",")]
    if element is not None:
        return [match.strip('"') for match in _FOR.findall(element)] or [""]
    return []


def _parse_address(text: str) -> Address | None:
    """An address, with or without port and brackets; an IPv4 address inside IPv6 is taken out of it."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
