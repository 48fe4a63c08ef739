//! Bodies that cannot be cloned, recorded while they are sent.

use super::resend::Resend;
use crate::{BoxError, HasTask, Safety, Task};
use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use std::{
    fmt,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker, ready},
};

/// Keeps requests with erased bodies, up to a cap. Made by [`replay`].
#[derive(Clone, Copy)]
pub struct Replay<F> {
    cap: usize,
    wrap: F,
}

/// Records bodies of up to `cap` bytes while they are sent, for another attempt. `wrap` turns the
/// recording body back into the client's own type: `replay(64 << 10, tonic::body::Body::new)`,
/// `replay(64 << 10, reqwest::Body::wrap)`.
///
/// Chunks are kept as they come and are not copied; trailers are kept. A body that says it is larger
/// than the cap is left alone, one that outgrows it is sent on unrecorded: both are sent once. An empty
/// body is not wrapped.
pub fn replay<B, F>(cap: usize, wrap: F) -> Replay<F>
where
    F: Fn(ReplayBody<B>) -> B,
{
    Replay { cap, wrap }
}

impl<F> fmt::Debug for Replay<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Replay").field("cap", &self.cap).finish_non_exhaustive()
    }
}

/// What [`Replay`] keeps of a request.
pub struct KeptReplay<B> {
    head: http::Request<()>,
    /// None: the body was empty.
    body: Option<Arc<Mutex<Recording<B>>>>,
}

impl<B> fmt::Debug for KeptReplay<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeptReplay").field("head", &self.head).finish_non_exhaustive()
    }
}

impl<B> HasTask for KeptReplay<B> {
    fn task(&self) -> Option<&Task> {
        self.head.task()
    }
    fn set_task(&mut self, task: Task) {
        self.head.set_task(task);
    }
    fn safety(&self) -> Safety {
        self.head.safety()
    }
}

impl<B, F> Resend<http::Request<B>> for Replay<F>
where
    B: Body<Data = Bytes> + Default + Unpin,
    B::Error: Into<BoxError>,
    F: Fn(ReplayBody<B>) -> B,
{
    type Kept = KeptReplay<B>;

    fn keep(&self, request: &mut http::Request<B>) -> Option<KeptReplay<B>> {
        if request.body().size_hint().lower() > self.cap as u64 {
            return None;
        }
        let body = if request.body().is_end_stream() {
            None
        } else {
            let recording = Recording::new(std::mem::take(request.body_mut()), self.cap);
            let recording = Arc::new(Mutex::new(recording));
            *request.body_mut() = (self.wrap)(reader(&recording)?);
            Some(recording)
        };
        let mut head = http::Request::new(());
        request.method().clone_into(head.method_mut());
        request.uri().clone_into(head.uri_mut());
        *head.version_mut() = request.version();
        request.headers().clone_into(head.headers_mut());
        request.extensions().clone_into(head.extensions_mut());
        Some(KeptReplay { head, body })
    }

    fn resendable(&self, kept: &KeptReplay<B>) -> bool {
        kept.body.as_ref().is_none_or(|recording| !lock(recording).spoiled)
    }

    fn again(&self, kept: &mut KeptReplay<B>) -> Option<http::Request<B>> {
        let body = match &kept.body {
            Some(recording) => (self.wrap)(reader(recording)?),
            None => B::default(),
        };
        let (parts, ()) = kept.head.clone().into_parts();
        Some(http::Request::from_parts(parts, body))
    }
}

/// A body and what was read of it so far.
struct Recording<B> {
    rest: B,
    chunks: Vec<Bytes>,
    recorded: usize,
    cap: usize,
    trailers: Option<HeaderMap>,
    ended: bool,
    /// It cannot be read from the start any more.
    spoiled: bool,
    /// Number of the newest reader: only that one may read.
    newest: u64,
    /// Where it waits for more.
    waiting: Option<Waker>,
}

impl<B> Recording<B> {
    fn new(body: B, cap: usize) -> Self {
        Recording {
            rest: body,
            chunks: Vec::new(),
            recorded: 0,
            cap,
            trailers: None,
            ended: false,
            spoiled: false,
            newest: 0,
            waiting: None,
        }
    }
}

fn lock<B>(recording: &Mutex<Recording<B>>) -> MutexGuard<'_, Recording<B>> {
    // A body that panicked while it was polled left `spoiled` set.
    recording.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A reader from the start; the ones before it may not read on.
fn reader<B>(recording: &Arc<Mutex<Recording<B>>>) -> Option<ReplayBody<B>> {
    let mut state = lock(recording);
    if state.spoiled {
        return None;
    }
    state.newest += 1;
    let body = ReplayBody { recording: recording.clone(), at: 0, number: state.newest, done: false };
    let waiting = state.waiting.take();
    drop(state);
    if let Some(before) = waiting {
        before.wake();
    }
    Some(body)
}

/// The body of a request that is kept by [`Replay`]: what was read before, from the start, then the
/// rest.
pub struct ReplayBody<B> {
    recording: Arc<Mutex<Recording<B>>>,
    at: usize,
    number: u64,
    done: bool,
}

/// The error of a [`ReplayBody`] whose request is sent again by now. Not an end of the body, which
/// would pass a part of it for the whole.
#[derive(Clone, Copy, Debug)]
pub struct Superseded;

impl fmt::Display for Superseded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("this request has been sent again: its body is read there")
    }
}
impl std::error::Error for Superseded {}

impl<B> Body for ReplayBody<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let me = &mut *self;
        if me.done {
            return Poll::Ready(None);
        }
        let mut state = lock(&me.recording);
        if state.newest != me.number {
            me.done = true;
            return Poll::Ready(Some(Err(Superseded.into())));
        }
        if let Some(chunk) = state.chunks.get(me.at) {
            me.at += 1;
            return Poll::Ready(Some(Ok(Frame::data(chunk.clone()))));
        }
        if state.ended {
            me.done = true;
            return Poll::Ready(state.trailers.clone().map(|trailers| Ok(Frame::trailers(trailers))));
        }
        let spoiled = std::mem::replace(&mut state.spoiled, true);
        let polled = Pin::new(&mut state.rest).poll_frame(cx);
        state.spoiled = spoiled;
        if polled.is_pending() {
            state.waiting = Some(cx.waker().clone());
        }
        let frame = match ready!(polled) {
            Some(Ok(frame)) => frame,
            Some(Err(error)) => {
                (me.done, state.spoiled) = (true, true);
                return Poll::Ready(Some(Err(error.into())));
            }
            None => {
                (me.done, state.ended) = (true, true);
                return Poll::Ready(None);
            }
        };
        if let Some(data) = frame.data_ref() {
            state.recorded = state.recorded.saturating_add(data.len());
            if state.recorded > state.cap {
                state.spoiled = true;
                state.chunks = Vec::new();
                me.at = 0;
            } else if !state.spoiled && !data.is_empty() {
                state.chunks.push(data.clone());
                me.at += 1;
            }
        } else if let Some(trailers) = frame.trailers_ref() {
            // The last frame there is.
            state.trailers = Some(trailers.clone());
            (me.done, state.ended) = (true, true);
        } else {
            state.spoiled = true;
        }
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        let state = lock(&self.recording);
        let read = self.at >= state.chunks.len();
        self.done
            || state.newest == self.number
                && read
                && if state.ended { state.trailers.is_none() } else { state.rest.is_end_stream() }
    }

    fn size_hint(&self) -> SizeHint {
        let state = lock(&self.recording);
        if self.done || state.newest != self.number {
            return SizeHint::default();
        }
        let recorded: usize = state.chunks.get(self.at..).unwrap_or_default().iter().map(Bytes::len).sum();
        let rest = if state.ended { SizeHint::with_exact(0) } else { state.rest.size_hint() };
        let mut hint = SizeHint::new();
        hint.set_lower(rest.lower().saturating_add(recorded as u64));
        if let Some(upper) = rest.upper() {
            hint.set_upper(upper.saturating_add(recorded as u64));
        }
        hint
    }
}

impl<B> fmt::Debug for ReplayBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplayBody").field("chunks_read", &self.at).finish_non_exhaustive()
    }
}

#[cfg(test)]
#[path = "replay_tests.rs"]
mod tests;
