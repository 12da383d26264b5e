"""Who may do what: address rules, and whose word counts on where a request came from.

zimg's notation, `allow|deny <address|address/mask|all>` joined by `;`, with the documented meaning:
the first rule that matches decides, and where none matches nobody may. (zimg itself read them last to
first, knew IPv4 only and believed X-Forwarded-For from anybody.)
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


@dataclass(frozen=True, slots=True)
class AccessRules:
    """Parsed access rules, in order: (allowed, network); a network of None is everybody."""

    rules: tuple[tuple[bool, Network | None], ...]

    def allows(self, client: Address | None) -> bool:
        """Whether the first rule that matches lets `client` in.

        None is a client nobody can vouch for. It may be any address, so every deny meets it and only
        `allow all` lets it in: else a denied client would merely have to forge a forwarding header.
        """
        for allowed, network in self.rules:
            if network is None or (client in network if client is not None else not allowed):
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
    """An address or network, IPv4 or IPv6. ValueError with a sentence when it is none.

    Clients lose their zone and have IPv4 taken out of IPv6, so a rule that did not would never match.
    """
    try:
        network = ip_network(text, strict=False)
    except ValueError:
        network = None
    if network is None or "%" in text:
        raise ValueError(f"'{text}' is not an address or address/mask")
    mapped = getattr(network.network_address, "ipv4_mapped", None)
    return ip_network((mapped, network.prefixlen - 96)) if mapped and network.prefixlen >= 96 else network


def find_client(peer: str, headers: Mapping[str, str], trusted: Sequence[Network]) -> Address | None:
    """The address that a request really comes from, None when nobody can vouch for it.

    Only a trusted proxy's X-Forwarded-For or Forwarded (RFC 7239) is read, from the right, past the
    trusted ones: everything further left was written by the client. A forwarding header from anybody else
    means an unknown proxy stands between, so the peer's own address says nothing about the client:
    else every client of an nginx on the same machine would count as loopback.
    """
    client = _parse_address(peer)
    forwarded = _forwarded(headers)
    if forwarded and not _is_trusted(client, trusted):
        return None
    while forwarded and _is_trusted(client, trusted):
        client = _parse_address(forwarded.pop())
    return client


def _is_trusted(client: Address | None, trusted: Sequence[Network]) -> bool:
    return client is not None and any(client in network for network in trusted)


def is_cross_site(headers: Mapping[str, str]) -> bool:
    """Whether a browser says that another site made this request.

    Sec-Fetch-Site decides where it is there: no page can forge it, and it holds behind a proxy that rewrites
    Host. Older browsers, and all of them over plain http, leave Origin, which must name this host. With a GET
    they leave not even that: then it takes a Referer from here, which a page can withhold but not forge.
    """
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("none", "same-origin")
    page = headers.get("origin")
    if page is None:
        # Every browser calls itself so, and a page cannot change it.
        if not headers.get("user-agent", "").startswith("Mozilla/"):
            return False
        page = headers.get("referer", "")
    _, scheme, rest = page.partition("://")
    return not scheme or rest.partition("/")[0].lower() != headers.get("host", "").lower()


def is_rebound(client: Address | None, headers: Mapping[str, str]) -> bool:
    """Whether this machine asks itself under a name that only the DNS can have given it.

    A page whose name was made to point at 127.0.0.1 (DNS rebinding) is of the same site to the browser, and
    its requests come from loopback; but its Host is neither an address nor localhost.
    """
    if client is None or not client.is_loopback:
        return False
    host = headers.get("host", "")
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    return _parse_address(host) is None and name.lower() != "localhost" and not name.lower().endswith(".localhost")


# RFC 7239 4: name=value pairs joined by ";", elements by ",", where a quoted value may hold either.
_PAIR = re.compile(
    r"[ \t]*(?P<name>[!#$%&'*+.^_`|~0-9A-Za-z-]+)="
    r'(?:"(?P<quoted>[^"\\]*)"|(?P<bare>[^\s",;]+))'
    r"[ \t]*(?P<end>[,;]|\Z)"
)


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
    return [] if element is None else _parse_forwarded(element)


def _parse_forwarded(field: str) -> list[str]:
    """The `for` of each element; "" where an element has none or two. A field that is not well-formed is all [""].

    Elements are told apart strictly: a client may open a quote that is meant to swallow what the proxy appends,
    or put `for=` into its Host, which a proxy then quotes after `host=`.
    """
    chain: list[str] = []
    address: str | None = None
    at = 0
    while found := _PAIR.match(field, at):
        if found["name"].lower() == "for":
            address = (found["bare"] or found["quoted"]) if address is None else ""
        if found["end"] != ";":
            chain.append(address or "")
            address = None
        if not found["end"]:
            return chain
        at = found.end()
    return [""]


_HOST = re.compile(r"(?:\[([^\]]*)\]|([^:]*))(?::\d+)?", re.ASCII)


def _parse_address(text: str) -> Address | None:
    """An address, with or without port and brackets; an IPv4 address inside IPv6 is taken out of it."""
    if found := _HOST.fullmatch(text):
        text = found[1] or found[2] or ""
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
