//! The body of a scripted reply.

use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep};

use super::service::OnWire;

/// A reply's body: complete at once, or streamed in chunks while the call is still served.
///
/// Dropping a streamed body before its end means that the caller hung up.
pub struct ScriptedBody {
    rest: Bytes,
    stream: Option<Box<Stream>>,
}

struct Stream {
    chunk: usize,
    /// Chunks that are still to come.
    left: u32,
    step: Duration,
    next: Pin<Box<Sleep>>,
    call: Option<OnWire>,
}

impl ScriptedBody {
    /// A body that is there at once.
    pub fn full(bytes: impl Into<Bytes>) -> Self {
        Self { rest: bytes.into(), stream: None }
    }

    pub(crate) fn streaming(bytes: Bytes, chunks: u32, head: Instant, time: Duration, call: OnWire) -> Self {
        let chunks = chunks.max(1);
        let step = time / chunks;
        let stream = Stream {
            chunk: bytes.len().div_ceil(chunks as usize),
            left: chunks,
            step,
            next: Box::pin(tokio::time::sleep_until(head + step)),
            call: Some(call),
        };
        Self { rest: bytes, stream: Some(Box::new(stream)) }
    }
}

impl fmt::Debug for ScriptedBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScriptedBody").field("rest", &self.rest.len()).finish_non_exhaustive()
    }
}

impl Body for ScriptedBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let me = &mut *self;
        let Some(stream) = &mut me.stream else {
            if me.rest.is_empty() {
                return Poll::Ready(None);
            }
            return Poll::Ready(Some(Ok(Frame::data(std::mem::take(&mut me.rest)))));
        };
        while stream.left > 0 {
            if stream.next.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            stream.left -= 1;
            if stream.left == 0 {
                if let Some(call) = stream.call.take() {
                    call.settle();
                }
            } else {
                let due = stream.next.deadline() + stream.step;
                stream.next.as_mut().reset(due);
            }
            let size = if stream.left == 0 { me.rest.len() } else { stream.chunk.min(me.rest.len()) };
            let data = me.rest.split_to(size);
            if !data.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(data))));
            }
        }
        Poll::Ready(None)
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.stream.as_ref().is_none_or(|s| s.left == 0)
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.rest.len() as u64)
    }
}
