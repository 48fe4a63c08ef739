//! Law 7 over the whole stack: however a call ends (an answer, an error, a panic, a drop at any poll, a body
//! read in part), nothing stays taken.

mod common;

use common::{Request, ms, request, secs};
use http_body::{Body as _, Frame};
use http_body_util::BodyExt as _;
use std::{
    future::{Future, poll_fn},
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, ready},
};
use tokio::time::Sleep;
use tower::{Service, ServiceBuilder};
use tower_herd::{
    AttemptTimeoutLayer, BoxError, ClassifyLayer, Fleet, FleetLimitLayer, HashedFailover, JitteredRetryLayer,
    Provider, ProviderSettings, RetryAfterLayer, Task, TaskLayer, failover::Rung,
};

/// A few frames, some time apart; may panic or fail on its way.
struct Body {
    left: u32,
    sleep: Option<Pin<Box<Sleep>>>,
    panics: bool,
    fails: bool,
}

impl http_body::Body for Body {
    type Data = bytes::Bytes;
    type Error = BoxError;
    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<bytes::Bytes>, BoxError>>> {
        if self.left == 0 {
            return Poll::Ready(None);
        }
        let sleep = self.sleep.get_or_insert_with(|| Box::pin(tokio::time::sleep(ms(5))));
        ready!(sleep.as_mut().poll(cx));
        self.sleep = None;
        self.left -= 1;
        assert!(!self.panics || self.left > 0, "{BUG}");
        if self.fails && self.left == 0 {
            return Poll::Ready(Some(Err("cut".into())));
        }
        Poll::Ready(Some(Ok(Frame::data(bytes::Bytes::from_static(b"frame")))))
    }
}

const BUG: &str = "a bug of the service";

/// Not ready at once, or fails there; panics anywhere; answers in every dialect.
#[derive(Clone)]
struct Wild {
    random: Arc<Mutex<fastrand::Rng>>,
    running: Arc<AtomicUsize>,
}

struct Running(Arc<AtomicUsize>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Wild {
    fn new(seed: u64) -> Self {
        Wild { random: Arc::new(Mutex::new(fastrand::Rng::with_seed(seed))), running: Arc::default() }
    }
    fn draw(&self, most: u32) -> u32 {
        self.random.lock().unwrap().u32(..most)
    }
}

impl Service<Request> for Wild {
    type Response = http::Response<Body>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<http::Response<Body>, BoxError>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        match self.draw(40) {
            0 => panic!("{BUG}"),
            1 => Poll::Ready(Err("not ready".into())),
            2..6 => {
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            _ => Poll::Ready(Ok(())),
        }
    }

    fn call(&mut self, _: Request) -> Self::Future {
        let (answer, after, body) = (self.draw(30), self.draw(40), self.draw(12));
        assert!(answer != 0, "{BUG}");
        self.running.fetch_add(1, Ordering::Relaxed);
        let running = Running(self.running.clone());
        Box::pin(async move {
            let _running = running;
            tokio::time::sleep(ms(after.into())).await;
            let (status, header) = match answer {
                1 => panic!("{BUG}"),
                2 => return Err("broken".into()),
                3 => return Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into()),
                4 => (429, Some(("retry-after", "1"))),
                5 => (429, None),
                6 => (503, None),
                7 => (529, Some(("retry-after", "2"))),
                8 => (429, Some(("retry-after", "soon"))),
                9 => (400, None),
                10 => (429, Some(("retry-after", "99999999999999999999999"))),
                _ => (200, None),
            };
            let mut reply = http::Response::builder().status(status);
            if let Some((name, value)) = header {
                reply = reply.header(name, value);
            }
            let (left, panics, fails) = (body % 4, body == 7, body == 6);
            Ok(reply.body(Body { left, sleep: None, panics, fails }).unwrap())
        })
    }
}

/// Polls a future so often, then drops it.
async fn polled<F: Future>(future: F, mut polls: usize) -> Option<F::Output> {
    let mut future = Some(Box::pin(future));
    poll_fn(|cx| {
        if polls == 0 {
            future = None;
            return Poll::Ready(None);
        }
        polls -= 1;
        let polled = future.as_mut().expect("not ready yet").as_mut().poll(cx).map(Some);
        if polls == 0 && polled.is_pending() {
            // At once, and not at the next wake-up, that may never come.
            future = None;
            return Poll::Ready(None);
        }
        polled
    })
    .await
}

async fn history(seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let fleet = Fleet::local().seed(seed);
    let providers: Vec<Provider> = (0..3u32)
        .map(|i| {
            let settings = ProviderSettings::new().ceiling(1 + i).aborts(random.bool());
            fleet.configure(&i.to_string(), settings).unwrap()
        })
        .collect();
    let services: Vec<Wild> = (0..3).map(|i| Wild::new(seed << 2 | i)).collect();
    let rungs = providers.iter().zip(&services).enumerate().map(|(i, (provider, service))| {
        let layers = ServiceBuilder::new()
            .layer(RetryAfterLayer::new(provider))
            .layer(FleetLimitLayer::new(provider))
            .layer(ClassifyLayer::new(provider))
            .layer(AttemptTimeoutLayer::new(ms(35)).idle(ms(50)));
        Rung::new(provider, layers.service(service.clone())).tier(i as u32 / 2)
    });
    let stack = ServiceBuilder::new()
        .layer(TaskLayer::new())
        .layer(JitteredRetryLayer::new().seed(seed).base(ms(10)))
        .service(HashedFailover::new(rungs).unwrap());
    let shared = Task::new(1).deadline_in(secs(20));
    let calls: Vec<_> = (0..60u64)
        .map(|i| {
            let polls = [random.usize(1..6), random.usize(1..40), usize::MAX][random.usize(..3)];
            let frames = random.usize(..5);
            let (provider, what) = (providers[random.usize(..3)].clone(), random.u32(..20));
            let start = ms(random.u64(..3000));
            let task = match random.u32(..3) {
                0 => shared.clone(),
                _ => Task::new(i).caller(i % 5).deadline_in(secs(30)),
            };
            let mut stack = stack.clone();
            tokio::spawn(async move {
                tokio::time::sleep(start).await;
                match what {
                    0 => provider.pause_for(ms(300)),
                    1 => provider.clear_pause(),
                    _ => {}
                }
                let mut request = request(i);
                request.extensions_mut().insert(task);
                let call = async {
                    poll_fn(|cx| stack.poll_ready(cx)).await?;
                    stack.call(request).await
                };
                let Some(Ok(reply)) = polled(call, polls).await else { return };
                let mut body = Box::pin(reply.into_body());
                for _ in 0..frames {
                    // Also beyond its end.
                    body.frame().await;
                }
                assert!(body.size_hint().lower() <= 1_000_000);
            })
        })
        .collect();
    for call in calls {
        // One that panicked is over too.
        drop(tokio::time::timeout(secs(100), call).await.unwrap_or_else(|_| panic!("seed {seed}: hangs")));
    }
    // What was dropped has lingered out.
    tokio::time::sleep(secs(11)).await;
    for (provider, service) in providers.iter().zip(&services) {
        let left = (provider.in_flight(), provider.waiting(), service.running.load(Ordering::Relaxed));
        assert_eq!(left, (0, 0, 0), "seed {seed}: {provider:?}");
    }
}

#[test]
fn nothing_stays_taken_however_calls_end() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if !info.to_string().contains(BUG) {
            report(info);
        }
    }));
    for seed in 0..60 {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.enable_time().start_paused(true).build().unwrap().block_on(history(seed));
    }
}
