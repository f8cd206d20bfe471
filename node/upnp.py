"""A home router that forwards ports when asked: UPnP's Internet Gateway Device (WANIPConnection, WANPPPConnection)."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import socket
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from peerloom.node.gateway import Gateway, GatewayRefused, outer_address_of
from peerloom.protocol.errors import LinkError

if TYPE_CHECKING:
    import aiohttp
    from async_upnp_client.client import UpnpService
    from async_upnp_client.const import HttpRequest, HttpResponse

log = logging.getLogger(__name__)

SEARCH_S = 2  # in which routers answer a search; its unit on the wire is whole seconds
CALL_S = 5.0  # for one call to a router
MAX_ANSWER_BYTES = 1 << 18  # of a router's answer
MAX_ANSWERS = 8  # to one search
DESCRIPTION = "peerloom"  # in the router's list of mappings
DEVICES = tuple(f"urn:schemas-upnp-org:device:InternetGatewayDevice:{version}" for version in (1, 2))
SERVICES = ("urn:schemas-upnp-org:service:WANIPConnection:", "urn:schemas-upnp-org:service:WANPPPConnection:")
PERMANENT_ONLY = 725  # a router's error: it knows no leases


class UpnpGateway:
    """A Gateway over UPnP; `inner` is this machine's address on the router's side."""

    def __init__(self, service: UpnpService, inner: str) -> None:
        self._service = service
        self._inner = inner

    async def outer_address(self) -> str:
        """Its address on the far side; raises LinkError for one behind a further router."""
        found = str((await self._call("GetExternalIPAddress")).get("NewExternalIPAddress", ""))
        return outer_address_of(found)

    async def forward(self, outer_port: int, inner_port: int, lease_s: int) -> float:
        """Without a lease where the router knows none; else its answer tells no other than the one asked for."""
        arguments = {
            "NewRemoteHost": "",
            "NewExternalPort": outer_port,
            "NewProtocol": "TCP",
            "NewInternalPort": inner_port,
            "NewInternalClient": self._inner,
            "NewEnabled": True,
            "NewPortMappingDescription": DESCRIPTION,
        }
        try:
            await self._call("AddPortMapping", **arguments, NewLeaseDuration=lease_s)
        except GatewayRefused as error:
            if error.code != PERMANENT_ONLY:
                raise
            await self._call("AddPortMapping", **arguments, NewLeaseDuration=0)
            return math.inf
        return lease_s

    async def withdraw(self, outer_port: int) -> None:
        """Ends a mapping."""
        await self._call("DeletePortMapping", NewRemoteHost="", NewExternalPort=outer_port, NewProtocol="TCP")

    async def _call(self, name: str, **arguments: Any) -> dict[str, Any]:
        from async_upnp_client.exceptions import UpnpActionError

        if not self._service.has_action(name):
            raise LinkError(f"the router knows no {name}")
        try:
            async with asyncio.timeout(CALL_S):
                return dict(await self._service.action(name).async_call(**arguments))
        except UpnpActionError as error:
            raise GatewayRefused(f"the router refuses {name}: {error}", error.error_code) from error
        except Exception as error:  # whatever a router's answer makes the library do
            raise LinkError(f"the router does not answer {name}: {error!r}") from error


async def upnp_gateways() -> list[Gateway]:
    """The routers that answer on this machine's network within SEARCH_S; raises nothing."""
    from async_upnp_client.search import async_search

    found: dict[str, None] = {}

    async def answered(headers: Any) -> None:
        location = str(headers.get("location", ""))
        if len(found) < MAX_ANSWERS and _is_its_own(location, str(headers.get("_host", ""))):
            found[location] = None

    searches = (async_search(answered, timeout=SEARCH_S, search_target=device) for device in DEVICES)
    for result in await asyncio.gather(*searches, return_exceptions=True):
        if isinstance(result, Exception):
            log.debug("no search for routers: %s", result)
    made = await asyncio.gather(*map(_described, found))
    return [gateway for gateway in made if gateway is not None]


def _is_its_own(location: str, host: str) -> bool:
    """Whether a router describes itself where it answered from: nobody shall have us call another machine."""
    try:
        parts = urlsplit(location)
        return parts.scheme == "http" and ipaddress.ip_address(parts.hostname or "") == ipaddress.ip_address(host)
    except ValueError:
        return False


async def _described(location: str) -> Gateway | None:
    from async_upnp_client.client_factory import UpnpFactory

    try:
        async with asyncio.timeout(2 * CALL_S):
            device = await UpnpFactory(_requester(location), non_strict=True).async_create_device(location)
        service = next((each for each in device.all_services if each.service_type.startswith(SERVICES)), None)
        return UpnpGateway(service, _inner_address(location)) if service is not None else None
    except Exception as error:  # whatever a router's answer makes the library do
        log.debug("no router at %s: %r", location, error)
        return None


def _inner_address(location: str) -> str:
    """This machine's address as the router sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((urlsplit(location).hostname or "", 1))  # sends nothing
        return str(probe.getsockname()[0])


def _requester(location: str) -> Any:
    """Calls one router and no other host, and takes so many bytes of an answer and no more."""
    import aiohttp
    from async_upnp_client.client import UpnpRequester
    from async_upnp_client.const import HttpResponse as Response
    from async_upnp_client.exceptions import UpnpCommunicationError

    router = urlsplit(location).netloc

    class Requester(UpnpRequester):
        async def async_http_request(self, http_request: HttpRequest) -> HttpResponse:
            if urlsplit(http_request.url).hostname != urlsplit(f"//{router}").hostname:
                raise UpnpCommunicationError("the router names another host")
            timeout = aiohttp.ClientTimeout(total=CALL_S)
            try:
                async with (
                    aiohttp.ClientSession(timeout=timeout) as session,
                    session.request(
                        http_request.method,
                        http_request.url,
                        headers=http_request.headers,
                        data=http_request.body,
                        allow_redirects=False,
                    ) as response,
                ):
                    body = await _read(response)
                    return Response(response.status, response.headers, body.decode("utf-8", "replace"))
            except (aiohttp.ClientError, OSError) as error:
                raise UpnpCommunicationError(repr(error)) from error

    return Requester()


async def _read(response: aiohttp.ClientResponse) -> bytes:
    from aiohttp import ClientPayloadError

    body = b""
    async for piece in response.content.iter_chunked(1 << 14):
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            raise ClientPayloadError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
    return body
