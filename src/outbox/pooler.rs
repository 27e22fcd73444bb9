//! Whether a pooler stands between this process and Postgres: one that gives each transaction another server connection
//! loses or mixes up what a session keeps, such as prepared statements, settings and `LISTEN`.

use std::future::{Ready, ready};
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use futures_util::FutureExt as _;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::CancelToken;
use tokio_postgres::tls::{ChannelBinding, TlsConnect, TlsStream};

/// The process that this connection was told to be its own. Postgres names the one that answers; a pooler names one of its own
/// making, as it has to know who wants to cancel what. The token tells it only in the packet that it sends.
pub(super) fn named_process(token: &CancelToken) -> Option<i32> {
    let packet = Packet::default();
    token.cancel_query_raw(packet.clone(), NoHandshake).now_or_never()?.ok()?;
    let sent = packet.0.lock().unwrap_or_else(PoisonError::into_inner);
    // The last two of its numbers: the process and its secret.
    let [process @ .., _, _, _, _] = sent.last_chunk::<8>()?;
    Some(i32::from_be_bytes(*process))
}

/// A stream that leads nowhere and offers TLS.
#[derive(Clone, Default)]
struct Packet(Arc<Mutex<Vec<u8>>>);

impl AsyncRead for Packet {
    fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        buffer.put_slice(b"S");
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Packet {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

impl TlsStream for Packet {
    fn channel_binding(&self) -> ChannelBinding {
        ChannelBinding::none()
    }
}

struct NoHandshake;

impl TlsConnect<Packet> for NoHandshake {
    type Stream = Packet;
    type Error = io::Error;
    type Future = Ready<io::Result<Packet>>;

    fn connect(self, stream: Packet) -> Self::Future {
        ready(Ok(stream))
    }
}
