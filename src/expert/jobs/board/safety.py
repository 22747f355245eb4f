"""Access checks of the board: a token once, then a cookie; only Host names of this machine; no
requests from other sites."""

from __future__ import annotations

import hashlib
import hmac
import socket
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote, urlencode

from expert.jobs.board.render import page
from expert.jobs.serve.body import RequestError
from expert.jobs.serve.listen import host_name, is_address, is_loopback

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "expert_board"
PAGE_HEADER = "x-expert-board"
"""A header that forms cannot send, and scripts of other sites only after a CORS preflight."""
STATIC = "/static/"
NO_TOKEN = "Open the address that expert board printed in its terminal; it contains the token."
WRONG_TOKEN = f"This token is not the board's: there is a new one at every start. {NO_TOKEN}"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; style-src-attr 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
"""No inline scripts and nothing from other sites, so that unescaped text would be harmless. Charts
place labels with style attributes."""
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
LOOPBACK_NAMES = ("localhost", "localhost.localdomain")


class Guard:
    """Wraps the application, which never sees a refused request."""

    def __init__(self, app: ASGIApp, *, token: str, host: str, read_only: bool) -> None:
        self.app = app
        self.token = token
        self.cookie = hmac.new(token.encode(), b"expert board", hashlib.sha256).hexdigest()
        self.read_only = read_only
        self._any_address = host in ("0.0.0.0", "::", "")
        self._own = {host.lower(), *LOOPBACK_NAMES}
        if not is_loopback(host):
            self._own |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.responses import HTMLResponse

        if scope["type"] != "http":
            return
        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in
                   scope["headers"]}  # fmt: skip

        async def sender(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {key.lower() for key, _ in message["headers"]}
                ours = [(key.encode(), value.encode()) for key, value in HEADERS.items()]
                missing = [pair for pair in ours if pair[0] not in present]
                message = {**message, "headers": [*message["headers"], *missing]}
            await send(message)

        try:
            welcome = self._check(scope, headers)
            if welcome is not None:
                cookie = f"{COOKIE}={self.cookie}; HttpOnly; SameSite=Strict; Path=/"
                # Not a redirect: browsers do not send SameSite=Strict cookies with one that
                # started on another site.
                html = page("welcome", "", place=welcome)
                answer = HTMLResponse(html, headers={"set-cookie": cookie})
                await answer(scope, receive, sender)
                return
            await self.app(scope, receive, sender)
        except RequestError as no:
            asks = no.status == 401
            title = "The board needs its token" if asks else f"{no.status}"
            html = page("message", title, text=str(no), asks=asks, inside=False)
            await HTMLResponse(html, no.status)(scope, receive, sender)

    def _check(self, scope: Scope, headers: dict[str, str]) -> str | None:
        """Raise Refused, or return the path to open if the request has the token."""
        if sum(key == b"host" for key, _ in scope["headers"]) != 1:
            raise RequestError(400, "The request needs one Host header.")
        host = headers["host"]
        if not self.is_own_host(host):
            raise RequestError(421, "This board does not serve that host name.")
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
        if origin not in (None, f"http://{host}", f"https://{host}"):
            raise RequestError(403, "The request comes from another site.")
        method = scope["method"]
        if method not in ("GET", "HEAD", "POST"):
            raise RequestError(405, "The board supports GET and POST only.")
        query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = query.get("token", [""])[0].encode()
        if method == "GET" and given and hmac.compare_digest(given, self.token.encode()):
            rest = urlencode({key: values for key, values in query.items() if key != "token"}, True)
            # Quoted: browsers drop tabs, which would turn "/<tab>/x" into another site.
            return "/" + quote(scope["path"].lstrip("/\\")) + (f"?{rest}" if rest else "")
        if method == "GET" and scope["path"].startswith(STATIC):
            return None  # styles and icons, also of the page that asks for the token
        if not self._is_known(headers.get("cookie", "")):
            raise RequestError(401, WRONG_TOKEN if "token" in query else NO_TOKEN)
        if method == "POST":
            if origin is None or site not in ("none", "same-origin"):
                raise RequestError(403, "The request does not come from a page of this board.")
            if headers.get(PAGE_HEADER) != "1":
                raise RequestError(403, "The request was not made by a page of this board.")
            if self.read_only:
                raise RequestError(403, "This board is read-only.")
        return None

    def is_own_host(self, host: str) -> bool:
        """Whether a Host header names this machine: with DNS rebinding, pages of another name would
        count as ours. A tunnel may use any port."""
        name = host_name(host)
        return name in self._own or is_loopback(name) or (self._any_address and is_address(name))

    def _is_known(self, cookies: str) -> bool:
        pairs = (pair.strip().partition("=") for pair in cookies.split(";"))
        values = [value for name, _, value in pairs if name == COOKIE]
        return any(hmac.compare_digest(value.encode(), self.cookie.encode()) for value in values)
