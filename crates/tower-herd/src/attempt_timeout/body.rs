//! The body of a reply whose silences are timed.

use super::{AttemptTimeout, Phase};
use crate::{BoxError, Switch, task::far};
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::time::{Instant, Sleep, sleep_until};

pin_project! {
    /// The body behind [`AttemptTimeoutLayer`](crate::AttemptTimeoutLayer): it fails with an
    /// [`AttemptTimeout`] if it stands still while somebody waits for it.
    pub struct TimedBody<B> {
        #[pin]
        body: B,
        // Made when the body is first found pending; kept armed from then on, and set again only
        // when it fires too early, so that a body that moves does not touch the timer. Boxed, since a
        // reply is moved more often than its body is waited for.
        sleep: Option<Pin<Box<Sleep>>>,
        pending_since: Option<Instant>,
        idle: Option<Duration>,
        // A silence does not end the body, but is counted here.
        counts: Option<Switch>,
        is_over: bool,
    }
}

impl<B> TimedBody<B> {
    pub(crate) fn new(body: B, idle: Option<Duration>, counts: Option<Switch>) -> Self {
        TimedBody { body, sleep: None, pending_since: None, idle, counts, is_over: false }
    }
}

impl<B: Default> Default for TimedBody<B> {
    /// Without a timeout.
    fn default() -> Self {
        B::default().into()
    }
}

impl<B> From<B> for TimedBody<B> {
    /// Without a timeout.
    fn from(body: B) -> Self {
        TimedBody::new(body, None, None)
    }
}

impl<B> Body for TimedBody<B>
where
    B: Body,
    B::Error: Into<BoxError>,
{
    type Data = B::Data;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, BoxError>>> {
        let me = self.project();
        if *me.is_over {
            return Poll::Ready(None);
        }
        if let Poll::Ready(frame) = me.body.poll_frame(cx) {
            *me.pending_since = None;
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        let Some(idle) = *me.idle else { return Poll::Pending };
        let since = *me.pending_since.get_or_insert_with(Instant::now);
        let at = since.checked_add(idle).unwrap_or_else(|| far(idle));
        let sleep = me.sleep.get_or_insert_with(|| Box::pin(sleep_until(at)));
        loop {
            ready!(sleep.as_mut().poll(cx));
            if sleep.deadline() >= at {
                break;
            }
            // It was armed for an earlier silence that ended in time.
            sleep.as_mut().reset(at);
        }
        if let Some(switch) = me.counts.take() {
            switch.count();
            *me.idle = None;
            *me.sleep = None;
            return Poll::Pending;
        }
        *me.is_over = true;
        Poll::Ready(Some(Err(AttemptTimeout { phase: Phase::Idle, after: idle }.into())))
    }

    fn is_end_stream(&self) -> bool {
        self.is_over || self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl<B> fmt::Debug for TimedBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TimedBody").field("idle", &self.idle).finish_non_exhaustive()
    }
}
