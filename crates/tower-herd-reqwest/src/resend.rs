//! How a request of reqwest is sent again.

use crate::clone_request;
use reqwest::Body;
use std::fmt;
use tower_herd::{
    HasTask, Replay, Resend, Safety, Task, replay,
    retry::{KeptReplay, ReplayBody, Resent},
};

/// Keeps bytes and text as they are, and records streams up to a cap.
///
/// Against `replay(cap, reqwest::Body::wrap)`, which makes a stream of every body: what was reusable
/// stays so, reqwest follows a 307 or 308 with it, it is not copied, and it counts against no cap.
#[derive(Clone, Copy, Debug)]
pub struct Reusable {
    streams: Replay<fn(ReplayBody<Body>) -> Body>,
}

impl Reusable {
    /// Streams are recorded up to this many bytes; one that outgrows them is sent once.
    #[must_use]
    pub fn new(cap: usize) -> Self {
        Reusable { streams: replay(cap, Body::wrap::<ReplayBody<Body>>) }
    }
}

/// A request that is kept by [`Reusable`].
pub struct Kept(State);

enum State {
    /// Its body is bytes.
    Bytes(http::Request<Body>),
    /// Its body is recorded while it is sent.
    Stream(KeptReplay<Body>),
}

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            State::Bytes(request) => f.debug_tuple("Kept").field(request).finish(),
            State::Stream(kept) => f.debug_tuple("Kept").field(kept).finish(),
        }
    }
}

impl Kept {
    fn request(&self) -> &dyn HasTask {
        match &self.0 {
            State::Bytes(request) => request,
            State::Stream(kept) => kept,
        }
    }
    fn request_mut(&mut self) -> &mut dyn HasTask {
        match &mut self.0 {
            State::Bytes(request) => request,
            State::Stream(kept) => kept,
        }
    }
}

impl HasTask for Kept {
    fn task(&self) -> Option<&Task> {
        self.request().task()
    }
    fn set_task(&mut self, task: Task) {
        self.request_mut().set_task(task);
    }
    fn safety(&self) -> Safety {
        self.request().safety()
    }
    fn resent(&self) -> Option<&Resent> {
        self.request().resent()
    }
    fn set_resent(&mut self, resent: Resent) {
        self.request_mut().set_resent(resent);
    }
}

impl Resend<http::Request<Body>> for Reusable {
    type Kept = Kept;
    fn keep(&self, request: &mut http::Request<Body>) -> Option<Kept> {
        match clone_request(request) {
            Some(copy) => Some(Kept(State::Bytes(copy))),
            None => self.streams.keep(request).map(|kept| Kept(State::Stream(kept))),
        }
    }
    fn resendable(&self, kept: &Kept) -> bool {
        match &kept.0 {
            State::Bytes(_) => true,
            State::Stream(kept) => self.streams.resendable(kept),
        }
    }
    fn again(&self, kept: &mut Kept) -> Option<http::Request<Body>> {
        match &mut kept.0 {
            State::Bytes(request) => clone_request(request),
            State::Stream(kept) => self.streams.again(kept),
        }
    }
}
