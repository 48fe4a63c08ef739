//! What a herd must withstand: panics of what its owner gave it, replies that are kept, switches turned by
//! several hands.
#![cfg(feature = "herd")]

use bytes::Bytes;
use futures_util::FutureExt;
use http_body_util::{BodyExt, Empty, Full, StreamBody, combinators::UnsyncBoxBody};
use std::{
    io,
    panic::AssertUnwindSafe,
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_herd::{
    BreakerLayer, Fleet, Herd, Mode, Provider, ProviderSettings, Refusal, RefusalKind, Safety, Task,
    breaker::{BreakerSettings, BreakerState},
    budget::BudgetSettings,
    herd::{Concern, RungSettings},
    observe::{Event, Observe},
    retry::Resend,
    spend::{Amount, Prices},
};

type Request = http::Request<Full<Bytes>>;

fn costly() -> Request {
    http::Request::post("http://p/").extension(Safety::Costly).body(Full::from("{}")).unwrap()
}

fn provider() -> Provider {
    Fleet::local().configure("p", ProviderSettings::new().aborts(true)).unwrap()
}

/// One call: the first goes through the layers, and after it the short way is open.
async fn warm_up(provider: &Provider) {
    let service =
        service_fn(|_: Request| async { Ok::<_, io::Error>(http::Response::new(Empty::<Bytes>::new())) });
    Herd::new(provider).layer(service).oneshot(costly()).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_call_is_over_when_its_body_has_ended_though_the_reply_is_kept() {
    let herd = Herd::new(&provider());
    let handle = herd.handle();
    let full = herd.layer(service_fn(|_: Request| async {
        Ok::<_, io::Error>(http::Response::new(Full::<Bytes>::from("{}")))
    }));
    let mut reply = full.clone().oneshot(costly()).await.unwrap();
    assert_eq!(handle.under_way(), 1);
    while let Some(frame) = reply.body_mut().frame().await {
        frame.unwrap();
    }
    assert_eq!(handle.under_way(), 0, "read to its end");
    let empty = herd.layer(service_fn(|_: Request| async {
        Ok::<_, io::Error>(http::Response::new(Empty::<Bytes>::new()))
    }));
    let _kept = empty.oneshot(costly()).await.unwrap();
    assert_eq!(handle.under_way(), 0, "there is no body");
    let failing = Herd::new(&provider()).attempts(1);
    let handle = failing.handle();
    let failing = failing.layer(service_fn(|_: Request| async {
        Err::<http::Response<Full<Bytes>>, _>(io::Error::other("reset"))
    }));
    let mut call = pin!(failing.oneshot(costly()));
    call.as_mut().await.unwrap_err();
    assert_eq!(handle.under_way(), 0, "an error is the end");
}

#[derive(Clone)]
struct Breaks;

impl Resend<Request> for Breaks {
    type Kept = Request;
    fn keep(&self, _: &mut Request) -> Option<Request> {
        panic!("it cannot be kept")
    }
    fn again(&self, _: &mut Request) -> Option<Request> {
        None
    }
}

#[tokio::test(start_paused = true)]
async fn who_panics_on_the_way_leaves_no_slot_behind() {
    let provider = provider();
    warm_up(&provider).await;
    let herd = Herd::new(&provider).resend(Breaks);
    let handle = herd.handle();
    let mut service = herd.layer(service_fn(|_: Request| async {
        Ok::<_, io::Error>(http::Response::new(Full::<Bytes>::from("{}")))
    }));
    for _ in 0..3 {
        service.ready().await.unwrap();
        assert!(std::panic::catch_unwind(AssertUnwindSafe(|| service.call(costly()))).is_err());
        assert_eq!((provider.in_flight(), handle.under_way()), (0, 0));
    }
}

/// The listener is the owner's: what it does must not cost a slot.
#[tokio::test(start_paused = true)]
async fn a_listener_that_panics_leaves_no_slot_behind() {
    let provider = provider();
    let settings = RungSettings::new().breaker(BreakerSettings::strict());
    drop(Herd::new(&provider).settings(settings).unwrap());
    warm_up(&provider).await;
    let herd = Herd::new(&provider).attempts(1).on_alert(|_| panic!("it cannot be told"));
    let service = herd.layer(service_fn(|_: Request| async {
        let frames = futures_util::stream::iter([
            Ok(http_body::Frame::data(Bytes::from("x"))),
            Err(io::Error::other("reset")),
        ]);
        Ok::<_, io::Error>(http::Response::new(UnsyncBoxBody::new(StreamBody::new(frames))))
    }));
    let mut panics = 0;
    let mut bodies = Vec::new();
    for _ in 0..5 {
        bodies.push(service.clone().oneshot(costly()).await.unwrap().into_body());
    }
    // The first came the short way: it trips the breaker.
    for body in bodies.into_iter().rev() {
        panics += u32::from(AssertUnwindSafe(body.collect()).catch_unwind().await.is_err());
    }
    assert_eq!((panics, provider.in_flight()), (1, 0));
}

#[derive(Clone, Default)]
struct Heard(Arc<Mutex<Vec<u32>>>);

impl Observe for Heard {
    fn observe(&self, event: &Event<'_>) {
        if let Event::InnerRetries { attempts, .. } = event {
            self.0.lock().unwrap().push(*attempts);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn retries_further_in_are_reported_of_first_calls_too() {
    for (status, ladder) in [(200, false), (503, false), (200, true)] {
        let heard = Heard::default();
        let provider = Fleet::local().observer(heard.clone()).provider("p");
        warm_up(&provider).await;
        let client = service_fn(move |_: Request| async move {
            let reply = http::Response::builder().status(status).header("x-envoy-attempt-count", 4);
            Ok::<_, io::Error>(reply.body(Full::<Bytes>::from("{}")).unwrap())
        });
        if ladder {
            let rung = tower_herd::failover::Rung::new(&provider, RungSettings::new());
            let herd = Herd::ladder([rung]).unwrap().attempts(1);
            herd.layer(client).oneshot(costly()).await.unwrap();
        } else {
            Herd::new(&provider).attempts(1).layer(client).oneshot(costly()).await.unwrap();
        }
        assert_eq!(*heard.0.lock().unwrap(), [4], "{status}, {ladder}");
    }
}

/// Two who switch at the same time: the short way is taken only if all enforce.
#[test]
fn two_hands_at_the_switches() {
    let provider = provider();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(warm_up(&provider));
    let herd = Herd::new(&provider);
    let handle = herd.handle();
    let mut service = herd.layer(service_fn(|_: Request| async {
        Ok::<_, io::Error>(http::Response::new(Full::<Bytes>::from("{}")))
    }));
    let call = runtime.block_on(service.ready()).unwrap().call(costly());
    assert!(format!("{call:?}").contains("direct: true"));
    drop(call);
    let turn = AtomicUsize::new(0);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            // At each odd turn, side by side with the other.
            let mut last = 0;
            loop {
                match turn.load(Ordering::Acquire) {
                    usize::MAX => return,
                    now if now == last || now % 2 == 0 => std::hint::spin_loop(),
                    now => {
                        handle.set(Concern::Timeout, Mode::Enforce);
                        last = now;
                        turn.store(now + 1, Ordering::Release);
                    }
                }
            }
        });
        let mut wrong = 0;
        for round in 0..2_000 {
            handle.set(Concern::Readmission, Mode::Enforce);
            handle.set(Concern::Timeout, Mode::Off);
            let now = turn.fetch_add(1, Ordering::AcqRel) + 1;
            // At every point of what the other does.
            (0..round % 100).for_each(|_| std::hint::spin_loop());
            handle.set(Concern::Readmission, Mode::Off);
            while turn.load(Ordering::Acquire) == now {
                std::hint::spin_loop();
            }
            let call = runtime.block_on(service.ready()).unwrap().call(costly());
            wrong += u32::from(format!("{call:?}").contains("direct: true"));
        }
        turn.store(usize::MAX, Ordering::Release);
        assert_eq!(wrong, 0);
    });
}

/// One reply with a number that cannot be must not stop what comes after it.
#[tokio::test(start_paused = true)]
async fn a_usage_that_cannot_be_believed_costs_the_estimate() {
    for figure in ["99999999999999999999999999", "18446744073709551615", "1000000001"] {
        let settings = ProviderSettings::new().aborts(true).tokens_per_minute(100_000);
        let provider = Fleet::local().configure("p", settings).unwrap();
        let prices = Prices::new(Amount::micros(1), Amount::units(1));
        let settings = RungSettings::new().prices(prices);
        let service =
            Herd::new(&provider).settings(settings).unwrap().layer(service_fn(move |_: Request| {
                let body = format!(r#"{{"usage":{{"prompt_tokens":3,"completion_tokens":{figure}}}}}"#);
                async move { Ok::<_, io::Error>(http::Response::new(Full::<Bytes>::from(body))) }
            }));
        let task = Task::new(1).deadline_in(Duration::from_secs(5)).spend(Amount::units(1));
        for _ in 0..3 {
            let mut request = costly();
            request.extensions_mut().insert(task.clone());
            let reply = service.clone().oneshot(request).await.unwrap();
            drop(reply.into_body().collect().await.unwrap());
        }
    }
}

/// There is one breaker: any of the herds before it turns it, whichever was built last.
#[tokio::test(start_paused = true)]
async fn each_of_two_herds_turns_the_breaker_that_they_share() {
    let provider = provider();
    let fails =
        service_fn(|_: Request| async { Err::<http::Response<Full<Bytes>>, _>(io::Error::other("reset")) });
    let herd = || {
        let settings = RungSettings::new().breaker(BreakerSettings::strict());
        Herd::new(&provider).settings(settings).unwrap().attempts(1).mode(Concern::Budget, Mode::Off)
    };
    let (one, two) = (herd(), herd());
    let handles = [one.handle(), two.handle()];
    let services = [one.layer(fails), two.layer(fails)];
    let refuses = || async {
        let error = services[0].clone().oneshot(costly()).await.unwrap_err();
        Refusal::find(&*error).is_some_and(|refusal| refusal.kind == RefusalKind::Open)
    };
    for handle in &handles {
        for _ in 0..5 {
            assert!(!refuses().await);
        }
        assert!(refuses().await);
        handle.set(Concern::Breaker, Mode::Off);
        assert_eq!(handles.each_ref().map(|handle| handle.mode(Concern::Breaker)), [Mode::Off; 2]);
        assert!(!refuses().await);
        handle.set(Concern::Breaker, Mode::Enforce);
    }
}

/// Its calls come the short way, but not while the breaker is open.
#[tokio::test(start_paused = true)]
async fn an_open_breaker_that_another_herd_has_switched_to_observe_counts_and_closes() {
    let provider = provider();
    // Nobody is shed, once there was a success.
    let settings =
        RungSettings::new().breaker(BreakerSettings::strict()).budget(BudgetSettings::new().k(1e6));
    let herd = Herd::new(&provider).settings(settings).unwrap().attempts(1);
    let handle = Herd::new(&provider).handle();
    let fails = herd.layer(service_fn(|_: Request| async {
        Err::<http::Response<Full<Bytes>>, _>(io::Error::other("reset"))
    }));
    let works = herd.layer(service_fn(|_: Request| async {
        Ok::<_, io::Error>(http::Response::new(Empty::<Bytes>::new()))
    }));
    works.clone().oneshot(costly()).await.unwrap();
    for _ in 0..5 {
        fails.clone().oneshot(costly()).await.unwrap_err();
    }
    handle.set(Concern::Breaker, Mode::Observe);
    let breaker = BreakerLayer::new(&provider).handle();
    let mut uncounted = 0;
    for _ in 0..60 {
        let before = handle.would_refuse(Concern::Breaker);
        works.clone().oneshot(costly()).await.unwrap();
        let was_counted = handle.would_refuse(Concern::Breaker) > before;
        uncounted += u32::from(breaker.state() != BreakerState::Closed && !was_counted);
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert_eq!((uncounted, breaker.state()), (0, BreakerState::Closed));
}
