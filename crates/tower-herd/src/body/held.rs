use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll},
};

pin_project! {
    /// A response body that holds something (a slot) until its end, its error or its drop.
    #[derive(Default)]
    pub struct HeldBody<B, G> {
        #[pin]
        body: B,
        guard: Option<G>,
    }
}

impl<B, G> HeldBody<B, G> {
    /// `body`, holding `guard`.
    #[cfg(feature = "fleet-limit")]
    #[inline]
    pub(crate) fn new(body: B, guard: Option<G>) -> Self {
        HeldBody { body, guard }
    }

    /// The body inside.
    pub fn get_ref(&self) -> &B {
        &self.body
    }
}

impl<B: fmt::Debug, G> fmt::Debug for HeldBody<B, G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeldBody").field("body", &self.body).field("holds", &self.guard.is_some()).finish()
    }
}

/// Something that a body holds: told apart are a call that ended and one that was cut short.
pub trait Guard {
    /// The call is over: its place is free.
    fn end(self);
}

impl<B: Body, G: Guard> Body for HeldBody<B, G> {
    type Data = B::Data;
    type Error = B::Error;

    #[inline]
    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let mut me = self.project();
        // Returned as it is: a frame is large, and to wrap it again would move it.
        let polled = me.body.as_mut().poll_frame(cx);
        if me.guard.is_some() {
            let ends = match &polled {
                Poll::Pending => false,
                Poll::Ready(Some(Ok(_))) => me.body.is_end_stream(),
                Poll::Ready(_) => true,
            };
            if ends && let Some(guard) = me.guard.take() {
                guard.end();
            }
        }
        polled
    }

    #[inline]
    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    #[inline]
    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
