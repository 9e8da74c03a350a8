"""TLS for the tests: an authority that issues certificates, and a proxy that speaks TLS in front of a server.

The embedded Redis is built without TLS, so the proxy terminates it.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import ssl
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_CHUNK = 65_536
_PATIENCE_S = 20

T = TypeVar("T")


class Authority:
    """An authority that is known to no system. `file` has its certificate."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory, self._name = directory, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.file = directory / f"{name}.pem"
        self.file.write_bytes(self._sign(self._key, name).public_bytes(serialization.Encoding.PEM))

    def server(self, host: str = "localhost", *, valid_days: float = 1) -> ssl.SSLContext:
        """The TLS context of a server with a certificate for `host`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.issue(host, valid_days=valid_days))
        return context

    def issue(self, host: str, *, valid_days: float = 1) -> tuple[Path, Path]:
        """The files of a new certificate for `host`, and of its key. With negative `valid_days`, it has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate, secret = (self._directory / f"{self._name}-{host}.{suffix}" for suffix in ("crt", "key"))
        certificate.write_bytes(self._sign(key, host, valid_days).public_bytes(serialization.Encoding.PEM))
        secret.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return certificate, secret

    def _sign(self, key: ec.EllipticCurvePrivateKey, name: str, valid_days: float = 1) -> x509.Certificate:
        is_authority = key is self._key
        now = dt.datetime.now(dt.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(_called(name))
            .issuer_name(_called(self._name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=valid_days))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if not is_authority:
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        return builder.sign(self._key, hashes.SHA256())


class Proxy:
    """A TLS proxy in front of the unix socket `upstream`. Without `upstream`, it reads and answers nothing.

    `received` has the bytes that clients sent after the handshake.
    """

    def __init__(self, context: ssl.SSLContext, upstream: str | None) -> None:
        self.received = bytearray()
        self._upstream = upstream
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda *_: None)  # refused handshakes
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=context))
        self.port: int = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Close all connections, and stop listening."""
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_PATIENCE_S)
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_PATIENCE_S)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        if self._upstream is None:
            await self._forward(reader, None, self.received)
            return
        answers, upstream = await asyncio.open_unix_connection(self._upstream)
        self._writers.add(upstream)
        await asyncio.gather(self._forward(reader, upstream, self.received), self._forward(answers, writer))

    async def _forward(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter | None, note: bytearray | None = None
    ) -> None:
        with suppress(OSError):
            while data := await source.read(_CHUNK):
                if note is not None:
                    note += data
                if target is not None:
                    target.write(data)
                    await target.drain()
        if target is not None:
            target.close()

    async def _end(self) -> None:
        self._server.close()
        for each in self._writers:
            each.transport.abort()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        await asyncio.gather(*others, *(each.wait_closed() for each in self._writers), return_exceptions=True)


@contextmanager
def proxy(context: ssl.SSLContext, upstream: str | None = None) -> Iterator[Proxy]:
    """A `Proxy` within the block."""
    made = Proxy(context, upstream)
    try:
        yield made
    finally:
        made.close()


def _called(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
