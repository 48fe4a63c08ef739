//! How a request is kept, so that it can be sent again.
//!
//! A request is used up by sending it. What is kept beside it, and what that costs, depends on its
//! body: [`CloneRequest`] clones (the default), [`Replay`] records an erased body while it is sent,
//! [`Never`] keeps nothing. Whatever cannot be kept is sent once; it never fails the first attempt
//! (TrueLayer/reqwest-middleware#44).

use crate::HasTask;

/// Keeps what is needed to send a request again.
pub trait Resend<Req> {
    /// What is kept: it knows the task and the safety of its request, so that every copy is a call of
    /// the same task.
    type Kept: HasTask;

    /// Keeps what a copy needs, just before the request is sent for the first time; none: it cannot be
    /// sent again. May wrap the body, never spoil it.
    fn keep(&self, request: &mut Req) -> Option<Self::Kept>;

    /// Whether [`again`](Resend::again) would give a copy now. Asked before a wait, so that nobody
    /// waits in vain.
    fn resendable(&self, kept: &Self::Kept) -> bool {
        let _ = kept;
        true
    }

    /// The next copy; none: it has become impossible. Copies handed out before must not be read any
    /// more.
    fn again(&self, kept: &mut Self::Kept) -> Option<Req>;
}

/// Clones the request: for bodies that are cheap to clone (`Bytes`, `Full<Bytes>`, `String`).
#[derive(Clone, Copy, Debug, Default)]
pub struct CloneRequest;

impl<Req: Clone + HasTask> Resend<Req> for CloneRequest {
    type Kept = Req;
    #[inline]
    fn keep(&self, request: &mut Req) -> Option<Req> {
        Some(request.clone())
    }
    fn again(&self, kept: &mut Req) -> Option<Req> {
        Some(kept.clone())
    }
}

/// Keeps nothing: every request is sent once, and neither cloned nor recorded.
#[derive(Clone, Copy, Debug, Default)]
pub struct Never;

impl<Req> Resend<Req> for Never {
    type Kept = ();
    #[inline]
    fn keep(&self, _: &mut Req) -> Option<()> {
        None
    }
    fn again(&self, (): &mut ()) -> Option<Req> {
        None
    }
}

#[cfg(feature = "http")]
pub use super::replay::{KeptReplay, Replay, ReplayBody, Superseded, replay};
