//! The sensor and the attempt timeout allocate nothing for a call that works.
#![cfg(all(feature = "http", feature = "attempt-timeout"))]

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    convert::Infallible,
    error::Error,
    future::Future,
    pin::pin,
    task::{Context, Poll, Waker},
    time::Duration,
};
use tower::{Layer, Service, service_fn};
use tower_herd::{AttemptTimeoutLayer, ClassifyLayer, Fleet, Kind, Signal, classify_fn};

struct Counting;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: hands everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = COUNT.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations<T>(work: impl FnOnce() -> T) -> (usize, T) {
    let before = COUNT.get();
    let result = work();
    (COUNT.get() - before, result)
}

fn now<F: Future>(future: F) -> F::Output {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("pending"),
    }
}

#[test]
fn http() {
    let provider = Fleet::local().provider("p");
    let replies = |mut reply: Option<http::Response<Full<Bytes>>>| {
        service_fn(move |_: http::Request<()>| std::future::ready(Ok::<_, Infallible>(reply.take().unwrap())))
    };
    let reply = || {
        let mut reply = http::Response::builder();
        for (name, value) in [
            ("content-type", "application/json"),
            ("x-ratelimit-limit-requests", "500"),
            ("x-ratelimit-remaining-requests", "499"),
            ("x-ratelimit-reset-requests", "120ms"),
        ] {
            reply = reply.header(name, value);
        }
        reply.body(Full::from("{}")).unwrap()
    };
    let stack = (ClassifyLayer::new(&provider), AttemptTimeoutLayer::default());
    let mut service = stack.layer(replies(Some(reply())));
    let (count, _) = allocations(|| {
        let reply = now(service.call(http::Request::new(()))).unwrap();
        let mut body = pin!(reply.into_body());
        now(body.frame()).unwrap().unwrap();
        assert!(now(body.frame()).is_none());
    });
    assert_eq!(count, 0);
}

#[test]
fn plain_replies() {
    let provider = Fleet::local().provider("p");
    let classify = classify_fn(|outcome: Result<&u64, &(dyn Error + 'static)>| {
        Signal::new(if outcome.is_ok() { Kind::Success } else { Kind::Failed })
    });
    let stack = (
        ClassifyLayer::new(&provider).classify(classify).replies(),
        AttemptTimeoutLayer::new(Duration::from_secs(1)).replies(),
    );
    let mut service = stack.layer(service_fn(|n: u64| std::future::ready(Ok::<_, Infallible>(n))));
    let (count, _) = allocations(|| now(service.call(3)).unwrap());
    assert_eq!(count, 0);
}

/// A timer is part of the future: a call that has to wait does not allocate either.
#[tokio::test(start_paused = true)]
async fn a_call_that_waits() {
    let layer = AttemptTimeoutLayer::new(Duration::from_secs(1)).replies();
    let mut service = layer.layer(service_fn(|_: u64| std::future::pending::<Result<u64, Infallible>>()));
    let mut call = pin!(service.call(3));
    let (count, poll) = allocations(|| call.as_mut().poll(&mut Context::from_waker(Waker::noop())));
    assert!(poll.is_pending());
    assert_eq!(count, 0);
}
