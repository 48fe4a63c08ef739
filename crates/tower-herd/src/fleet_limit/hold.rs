use crate::provider::Place;

/// How long a reply keeps the slot of its call. It decides the type of the reply.
#[diagnostic::on_unimplemented(
    message = "a slot of a reply of type `{Res}` cannot be held until the end of a body",
    note = "for replies that are not HTTP: `FleetLimitLayer::until_reply`"
)]
pub trait Hold<Res>: sealed::Sealed {
    /// The reply, with what it holds.
    type Held;
    #[doc(hidden)]
    fn hold(&self, reply: Res, slot: HeldSlot) -> Self::Held;
}

/// Until the response body has ended or was dropped: a stream keeps its slot. The default.
#[derive(Clone, Copy, Debug, Default)]
pub struct UntilBodyEnd;

/// Until the reply is there. For replies without a body, and for providers that count calls only up
/// to the response head.
#[derive(Clone, Copy, Debug, Default)]
pub struct UntilReply;

/// The slot of a call that succeeded so far; none if it was given back at the head.
#[doc(hidden)]
#[derive(Debug)]
pub struct HeldSlot(pub(super) Option<Held>);

/// Keeps the slot of a call in its response body.
pub struct Held(pub(crate) Place);

impl std::fmt::Debug for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Held")
    }
}

#[cfg(feature = "http")]
impl crate::body::Guard for Held {
    fn end(self) {
        self.0.end();
    }
}

#[cfg(feature = "http")]
impl<B: http_body::Body> Hold<http::Response<B>> for UntilBodyEnd {
    type Held = http::Response<crate::body::HeldBody<B, Held>>;
    #[inline(always)]
    fn hold(&self, reply: http::Response<B>, slot: HeldSlot) -> Self::Held {
        let mut slot = slot.0;
        reply.map(|body| {
            if body.is_end_stream()
                && let Some(held) = slot.take()
            {
                held.0.end();
            }
            crate::body::HeldBody::new(body, slot)
        })
    }
}

impl<Res> Hold<Res> for UntilReply {
    type Held = Res;
    #[inline]
    fn hold(&self, reply: Res, slot: HeldSlot) -> Res {
        if let Some(held) = slot.0 {
            held.0.end();
        }
        reply
    }
}

mod sealed {
    #[allow(unnameable_types, reason = "so that nobody else can implement `Hold`")]
    pub trait Sealed {}
    impl Sealed for super::UntilBodyEnd {}
    impl Sealed for super::UntilReply {}
}
