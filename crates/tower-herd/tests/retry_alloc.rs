//! The happy path of the retry layer allocates nothing.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    convert::Infallible,
    error::Error,
    future::{Future, Ready, ready},
    pin::pin,
    task::{Context, Poll, Waker},
};
use tower::{Layer, Service};
use tower_herd::{JitteredRetryLayer, Kind, Signal, classify_fn};

struct Counting;
thread_local! { static COUNT: Cell<u64> = const { Cell::new(0) }; }

// SAFETY: hands everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.with(|count| count.set(count.get() + 1));
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        unsafe { System.dealloc(at, layout) }
    }
}
#[global_allocator]
static COUNTING: Counting = Counting;

#[derive(Clone)]
struct Echo;
impl Service<u64> for Echo {
    type Response = u64;
    type Error = Infallible;
    type Future = Ready<Result<u64, Infallible>>;
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }
    fn call(&mut self, n: u64) -> Self::Future {
        ready(Ok(n))
    }
}

#[test]
fn a_success_allocates_nothing() {
    let understood = classify_fn(|outcome: Result<&u64, &(dyn Error + 'static)>| {
        Signal::new(if outcome.is_ok() { Kind::Success } else { Kind::Failed })
    });
    let mut service = JitteredRetryLayer::new().classify(understood).layer(Echo);
    let mut cx = Context::from_waker(Waker::noop());
    let before = COUNT.with(Cell::get);
    for n in 0..100 {
        assert!(service.poll_ready(&mut cx).is_ready());
        assert!(matches!(pin!(service.call(n)).poll(&mut cx), Poll::Ready(Ok(m)) if m == n));
    }
    assert_eq!(COUNT.with(Cell::get) - before, 0);
}
