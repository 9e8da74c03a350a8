"""TLS for the tests: an authority that issues certificates, and a proxy that speaks TLS in front of a server.

The embedded Redis is built without TLS, so the proxy terminates it.
"""

from __future__ import annotations

import asyncio
import datetime
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_CHUNK = 65_536
_PATIENCE_S = 20


class Authority:
    """An authority that is known to no system. `file` has its certificate."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory, self._name = directory, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.file = directory / f"{name}.pem"
        self.file.write_bytes(self._sign(self._key, name).public_bytes(serialization.Encoding.PEM))

    def server(self, host: str = "localhost") -> ssl.SSLContext:
        """The TLS context of a server with a certificate for `host`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.issue(host))
        return context

    def issue(self, host: str) -> tuple[Path, Path]:
        """The files of a new certificate for `host`, and of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate, secret = (self._directory / f"{self._name}-{host}.{suffix}" for suffix in ("crt", "key"))
        certificate.write_bytes(self._sign(key, host).public_bytes(serialization.Encoding.PEM))
        secret.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return certificate, secret

    def _sign(self, key: ec.EllipticCurvePrivateKey, name: str) -> x509.Certificate:
        is_authority = key is self._key
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(_called(name))
            .issuer_name(_called(self._name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
        )
        if not is_authority:
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        return builder.sign(self._key, hashes.SHA256())


class Proxy:
    """What a TLS proxy has seen: `received` has the bytes that clients sent after the handshake."""

    def __init__(self) -> None:
        self.port = 0
        self.received = bytearray()


@contextmanager
def proxy(context: ssl.SSLContext, socket: str | None = None) -> Iterator[Proxy]:
    """A TLS proxy on loopback, in front of the unix socket `socket`. Without a socket, it answers nothing."""
    seen, loop = Proxy(), asyncio.new_event_loop()
    writers: set[asyncio.StreamWriter] = set()

    async def forward(source: asyncio.StreamReader, target: asyncio.StreamWriter | None, *, noted: bool) -> None:
        with suppress(OSError):
            while data := await source.read(_CHUNK):
                if noted:
                    seen.received += data
                if target is not None:
                    target.write(data)
                    await target.drain()
        if target is not None:
            target.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        if socket is None:
            await forward(reader, None, noted=True)
            return
        answers, upstream = await asyncio.open_unix_connection(socket)
        writers.add(upstream)
        await asyncio.gather(forward(reader, upstream, noted=True), forward(answers, writer, noted=False))

    async def serve() -> asyncio.Server:
        return await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)

    async def end() -> None:
        server.close()
        for each in writers:
            each.transport.abort()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        await asyncio.gather(*others, *(each.wait_closed() for each in writers), return_exceptions=True)

    loop.set_exception_handler(lambda *_: None)  # refused handshakes
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(serve(), loop).result(_PATIENCE_S)
    seen.port = server.sockets[0].getsockname()[1]
    try:
        yield seen
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result(_PATIENCE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_PATIENCE_S)
        loop.close()


def _called(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
