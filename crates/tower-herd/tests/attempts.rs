//! What `AttemptsLayer` and `IncomingAttemptsLayer` write, read and leave alone.

mod attempts_support;

use attempts_support::*;
use http::HeaderMap;
use std::{sync::Arc, time::Duration};
use tokio::time::Instant;
use tower::{ServiceBuilder, ServiceExt};
use tower_herd::{
    AttemptsLayer, BoxError, Exhausted, Fleet, HasTask, HttpClassify, IncomingAttemptsLayer,
    JitteredRetryLayer, Mode, Provider, RatioBudget, Refusal, RefusalKind, Switch, Task, TaskLayer,
    attempts::{HEADER, Told},
    refusal::{error_reply, grpc_error_reply},
};

fn provider() -> Provider {
    Fleet::local().provider("p")
}

/// The headers of each attempt of one request, all of which fail.
async fn sent(layer: AttemptsLayer, request: Request) -> Vec<HeaderMap> {
    let wire = Wire::new(|_, _| reply(500, &[]));
    let stack = ServiceBuilder::new().layer(JitteredRetryLayer::new()).layer(layer).service(wire.service());
    stack.oneshot(request).await.unwrap();
    wire.headers()
}

fn value(headers: &HeaderMap, name: &str) -> Option<String> {
    headers.get(name).map(|value| value.to_str().unwrap().to_owned())
}

fn all(sent: &[HeaderMap], name: &str) -> Vec<Option<String>> {
    sent.iter().map(|headers| value(headers, name)).collect()
}

const ENVOY: &str = "x-envoy-attempt-count";
const GRPC: &str = "grpc-previous-rpc-attempts";
const OWN: &str = "tower-herd-attempts";

#[tokio::test(start_paused = true)]
async fn each_attempt_says_which_it_is_and_a_first_call_says_nothing() {
    let sent = sent(AttemptsLayer::new(&provider()), grpc(get())).await;
    let some = |text: &str| Some(text.to_owned());
    assert_eq!(all(&sent, ENVOY), [None, some("2"), some("3")]);
    assert_eq!(all(&sent, GRPC), [None, some("1"), some("2")]);
    // Without a task there is nothing to say of what is left.
    assert_eq!(all(&sent, OWN), [None, some("made=1"), some("made=2")]);
}

#[tokio::test(start_paused = true)]
async fn what_is_left_is_told_as_it_is_at_the_wire() {
    let task = Task::new(1).allowance(3).deadline_in(S(20));
    let start = Instant::now();
    let sent = sent(AttemptsLayer::new(&provider()).tell_first(true), of(&task, get())).await;
    let told: Vec<_> = sent.iter().map(Told::of).collect();
    assert_eq!(told[0].time, Some(S(20)));
    let counts: Vec<_> = told.iter().map(|told| (told.made, told.left)).collect();
    assert_eq!(counts, [(Some(0), Some(3)), (Some(1), Some(2)), (Some(2), Some(1))]);
    assert!(told[1].time < told[0].time && told[2].time < told[1].time, "{told:?}");
    let ended = S(20).checked_sub(start.elapsed()).unwrap();
    assert!(told[2].time.unwrap().abs_diff(ended) <= MS(1), "{told:?}, {ended:?}");
}

#[tokio::test(start_paused = true)]
async fn each_dialect_can_be_left_out() {
    let names = [OWN, GRPC, ENVOY];
    for (left_out, layer) in [
        (OWN, AttemptsLayer::new(&provider()).own(false)),
        (GRPC, AttemptsLayer::new(&provider()).grpc(false)),
        (ENVOY, AttemptsLayer::new(&provider()).envoy(false)),
    ] {
        let sent = sent(layer, grpc(get())).await;
        for name in names {
            assert_eq!(sent[1].contains_key(name), name != left_out, "{name} without {left_out}");
        }
    }
    let sent = sent(AttemptsLayer::new(&provider()), get()).await;
    assert!(!sent[1].contains_key(GRPC), "only in gRPC");
}

#[tokio::test(start_paused = true)]
async fn what_another_hop_has_counted_is_not_handed_on_as_ours() {
    let mut request = grpc(of(&Task::new(1).made_before(4), get()));
    request.headers_mut().insert(ENVOY, "7".parse().unwrap());
    request.headers_mut().insert(GRPC, "6".parse().unwrap());
    let sent = sent(AttemptsLayer::new(&provider()), request).await;
    let some = |text: &str| Some(text.to_owned());
    assert_eq!(all(&sent, ENVOY), [some("1"), some("2"), some("3")]);
    assert_eq!(all(&sent, GRPC), [None, some("1"), some("2")]);
    let made: Vec<_> = sent.iter().map(|headers| Told::of(headers).made).collect();
    assert_eq!(made, [Some(4), Some(5), Some(6)], "our own counts through");
}

#[tokio::test(start_paused = true)]
async fn observed_and_switched_off_nothing_is_written() {
    for (mode, counted) in [(Mode::Observe, 2), (Mode::Off, 0)] {
        let switch = Switch::new(mode);
        let layer = AttemptsLayer::new(&provider()).switch(&switch);
        assert_eq!(layer.handle().mode(), mode);
        let sent = sent(layer, grpc(get())).await;
        assert!(
            sent.iter().all(|headers| [OWN, GRPC, ENVOY].iter().all(|name| !headers.contains_key(*name)))
        );
        assert_eq!(switch.would_refuse(), counted);
    }
}

// ------------------------------------------------------------------------------------ inner retries

/// What is reported when the provider's replies say this, a call every `gap`.
async fn reported(
    mode: Mode,
    headers: &'static [(&str, &str)],
    calls: u32,
    gap: Duration,
) -> Vec<(String, u32)> {
    let seen = InnerRetries::default();
    let provider = Fleet::local().observer(seen.clone()).provider("mesh");
    let wire = Wire::new(move |_, _| reply(200, headers));
    let layer = AttemptsLayer::new(&provider).switch(&Switch::new(mode));
    for _ in 0..calls {
        // A layer for each call: what is said once a minute is the provider's.
        let stack = ServiceBuilder::new().layer(layer.clone()).service(wire.service());
        stack.oneshot(get()).await.unwrap();
        tokio::time::sleep(gap).await;
    }
    seen.all()
}

#[tokio::test(start_paused = true)]
async fn retries_further_in_are_named_once_a_minute() {
    let three = |name: &str| vec![(name.to_owned(), 3)];
    assert_eq!(reported(Mode::Enforce, &[(ENVOY, "3")], 50, S(1)).await, three("mesh"));
    assert_eq!(reported(Mode::Enforce, &[(GRPC, "2")], 50, S(1)).await, three("mesh"));
    assert_eq!(reported(Mode::Observe, &[(GRPC, "2")], 1, S(1)).await, three("mesh"));
    assert_eq!(reported(Mode::Enforce, &[(ENVOY, "3")], 130, S(1)).await.len(), 3);
    for quiet in [&[(ENVOY, "1")][..], &[(GRPC, "0")], &[(ENVOY, "x")], &[]] {
        assert_eq!(reported(Mode::Enforce, quiet, 5, S(1)).await, []);
    }
    assert_eq!(reported(Mode::Off, &[(ENVOY, "3")], 5, S(1)).await, []);
}

#[tokio::test(start_paused = true)]
async fn our_own_attempts_that_come_back_are_no_inner_retries() {
    let seen = InnerRetries::default();
    let provider = Fleet::local().observer(seen.clone()).provider("p");
    // A server that says how often it was called, as ours does.
    let wire = Wire::new(|n, _| reply(if n < 2 { 500 } else { 200 }, &[(ENVOY, ["1", "2", "3"][n])]));
    let stack = ServiceBuilder::new()
        .layer(JitteredRetryLayer::new())
        .layer(AttemptsLayer::new(&provider))
        .service(wire.service());
    let reply = stack.oneshot(get()).await.unwrap();
    assert_eq!((reply.status().as_u16(), wire.headers().len(), seen.all()), (200, 3, vec![]));
    assert!(!reply.headers().contains_key(ENVOY), "a proxy would hand it on as a count of its own");
}

#[tokio::test(start_paused = true)]
async fn a_server_tells_back_what_came_between() {
    let seen = InnerRetries::default();
    let provider = Fleet::local().observer(seen.clone()).provider("p");
    let server = ServiceBuilder::new()
        .layer(IncomingAttemptsLayer::new())
        .service(Wire::new(|_, _| reply(200, &[])).service());
    // A sidecar that has tried twice before, and does not say so itself.
    let client = ServiceBuilder::new()
        .layer(AttemptsLayer::new(&provider))
        .map_request(|mut request: Request| {
            request.headers_mut().insert(ENVOY, "3".parse().unwrap());
            request
        })
        .service(server);
    client.oneshot(get()).await.unwrap();
    assert_eq!(seen.all(), [("p".to_owned(), 3)]);
}

// ------------------------------------------------------------------------------------- the server's side

/// The task that a handler sees.
async fn task_of(layer: IncomingAttemptsLayer, request: Request) -> Option<Task> {
    let wire = Wire::new(|_, _| reply(200, &[]));
    layer_of(layer, wire.service()).oneshot(request).await.unwrap();
    wire.tasks().pop().unwrap()
}

fn layer_of<S>(layer: IncomingAttemptsLayer, service: S) -> tower_herd::attempts::IncomingAttempts<S> {
    ServiceBuilder::new().layer(layer).service(service)
}

fn told(value: &str) -> Request {
    let mut request = get();
    request.headers_mut().insert(HEADER, value.parse().unwrap());
    request
}

#[tokio::test(start_paused = true)]
async fn a_request_gets_a_task_with_the_least_of_all_that_is_said() {
    let now = Instant::now();
    let plain = task_of(IncomingAttemptsLayer::new(), get()).await.unwrap();
    assert_eq!((plain.left(), plain.deadline_at(), plain.calls_before()), (3, Some(now + S(60)), None));
    let layer = || IncomingAttemptsLayer::new().allowance(5).deadline(S(30));
    let own = task_of(layer(), get()).await.unwrap();
    assert_eq!((own.left(), own.deadline_at()), (5, Some(now + S(30))));
    let less = task_of(layer(), told("made=2, left=1, ms=700")).await.unwrap();
    assert_eq!((less.left(), less.deadline_at(), less.calls_before()), (1, Some(now + MS(700)), Some(2)));
    let more = task_of(layer(), told("left=99, ms=99999999")).await.unwrap();
    assert_eq!((more.left(), more.deadline_at()), (5, Some(now + S(30))));
    // The caller's own task is narrowed and stays what it is.
    let known = Task::new("job").caller("agent").allowance(4).deadline_in(S(10));
    let kept = task_of(layer(), of(&known, told("left=2"))).await.unwrap();
    assert_eq!((kept.id(), kept.caller_key()), (known.id(), known.caller_key()));
    assert_eq!((kept.left(), kept.deadline_at()), (2, Some(now + S(10))));
    let fixed = || IncomingAttemptsLayer::new().seed(7);
    let ids = (task_of(fixed(), get()).await.unwrap().id(), task_of(fixed(), get()).await.unwrap().id());
    assert_eq!(ids.0, ids.1);
    assert_ne!(ids.0, plain.id());
}

#[tokio::test(start_paused = true)]
async fn one_attempt_left_is_one_attempt_further_in() {
    let wire = Wire::new(|_, _| reply(500, &[]));
    let inner = ServiceBuilder::new()
        .layer(JitteredRetryLayer::new())
        .layer(AttemptsLayer::new(&provider()))
        .service(wire.service());
    for (request, calls) in [(get(), 3), (told("made=1, left=1"), 1), (told("left=2"), 2)] {
        let before = wire.headers().len();
        let server = layer_of(IncomingAttemptsLayer::new(), inner.clone());
        let is_told = !request.headers().is_empty();
        let answer = server.oneshot(request).await.unwrap();
        let sent = wire.headers().split_off(before);
        assert_eq!(sent.len(), calls);
        assert_eq!(sent[0].contains_key(HEADER), is_told, "once told, told on");
        assert_eq!(value(answer.headers(), "x-should-retry").as_deref(), Some("false"));
    }
}

#[tokio::test(start_paused = true)]
async fn a_repetition_that_comes_in_pays_into_no_budget() {
    let budget = RatioBudget::new(0.1).reserve(0, S(10));
    let inner = ServiceBuilder::new()
        .layer(JitteredRetryLayer::new().budget(budget.clone()))
        .service(Wire::new(|_, _| reply(200, &[])).service());
    for (request, balance) in [(get(), 0.1), (told("made=1"), 0.1), (told("made=0"), 0.2)] {
        layer_of(IncomingAttemptsLayer::new(), inner.clone()).oneshot(request).await.unwrap();
        assert_eq!(budget.balance(), balance);
    }
    let mut envoy = get();
    envoy.headers_mut().insert(ENVOY, "2".parse().unwrap());
    layer_of(IncomingAttemptsLayer::new(), inner).oneshot(envoy).await.unwrap();
    assert_eq!(budget.balance(), 0.2);
}

#[tokio::test(start_paused = true)]
async fn a_failure_is_marked_even_if_the_handler_makes_its_own_reply() {
    let wire = Wire::new(|_, _| reply(500, &[]));
    let inner = ServiceBuilder::new().layer(JitteredRetryLayer::new()).service(wire.service());
    for (kept, status, marked) in [(true, 502, true), (true, 200, false), (false, 502, false)] {
        let inner = inner.clone();
        let handler = tower::service_fn(move |request: Request| {
            let inner = inner.clone();
            async move {
                let task = request.task().cloned().filter(|_| kept).unwrap_or_else(|| Task::new(9));
                inner.oneshot(of(&task, get())).await?;
                let mut anew = reply(status, &[("x-should-retry", "true")]);
                anew.headers_mut().insert("x-own", "1".parse().unwrap());
                Ok::<_, BoxError>(anew)
            }
        });
        let answer = layer_of(IncomingAttemptsLayer::new(), handler).oneshot(get()).await.unwrap();
        assert_eq!(
            value(answer.headers(), "x-should-retry").as_deref(),
            Some(if marked { "false" } else { "true" })
        );
        assert_eq!(value(answer.headers(), "grpc-retry-pushback-ms"), None);
    }
}

// An error bears no mark, so the task has to say it; a refusal that ends is no giving up.
#[tokio::test(start_paused = true)]
async fn a_reply_that_is_made_of_an_error_is_marked_if_that_was_given_up() {
    let refuse = |kind, wait: Option<u64>| -> BoxError {
        let at = wait.map(|wait| Instant::now() + S(wait));
        Refusal::new(kind, "no", Arc::from("p"), at).into()
    };
    let cut = || -> BoxError { std::io::Error::from(std::io::ErrorKind::ConnectionReset).into() };
    for (error, calls, marked) in [
        (0, 3, true),
        (1, 1, true),
        // Paused for longer than the deadline: who can wait may come back.
        (2, 1, false),
    ] {
        let made = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let counted = made.clone();
        let inner = ServiceBuilder::new().layer(JitteredRetryLayer::new()).service_fn(move |_: Request| {
            counted.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            let error = match error {
                0 => cut(),
                1 => refuse(RefusalKind::Spend, None),
                _ => refuse(RefusalKind::Paused, Some(600)),
            };
            async move { Err::<Response, _>(error) }
        });
        let handler = tower::service_fn(move |request: Request| {
            let call = inner.clone().oneshot(request);
            // Whatever went wrong, in the handler's own words.
            async move { Ok::<_, BoxError>(call.await.unwrap_or_else(|_| reply(500, &[]))) }
        });
        let answer = layer_of(IncomingAttemptsLayer::new(), handler).oneshot(get()).await.unwrap();
        assert_eq!(made.load(std::sync::atomic::Ordering::SeqCst), calls);
        assert_eq!(answer.headers().contains_key("x-should-retry"), marked, "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_call_that_nobody_gave_up_is_not_marked() {
    let wire = Wire::new(|_, _| reply(404, &[]));
    let inner = ServiceBuilder::new().layer(JitteredRetryLayer::new()).service(wire.service());
    let answer = layer_of(IncomingAttemptsLayer::new(), inner).oneshot(get()).await.unwrap();
    assert_eq!((answer.status().as_u16(), answer.headers().len()), (404, 0));
}

#[tokio::test(start_paused = true)]
async fn grpc_failures_are_marked_by_the_pushback() {
    let wire = Wire::new(|_, _| reply(200, &[("content-type", "application/grpc"), ("grpc-status", "14")]));
    let inner = ServiceBuilder::new().layer(JitteredRetryLayer::new()).service(wire.service());
    let answer = layer_of(IncomingAttemptsLayer::new(), inner).oneshot(grpc(get())).await.unwrap();
    assert_eq!(value(answer.headers(), "grpc-retry-pushback-ms").as_deref(), Some("-1"));
    // And who sees it stops.
    assert!(tower_herd::Classify::exhausted(&HttpClassify, &answer));
}

#[tokio::test(start_paused = true)]
async fn observed_and_switched_off_requests_and_replies_pass_unchanged() {
    let exhausted = || {
        let mut failed = reply(503, &[]);
        failed.extensions_mut().insert(Exhausted::new(3, None));
        failed
    };
    for (mode, counted) in [(Mode::Observe, 1), (Mode::Off, 0)] {
        let switch = Switch::new(mode);
        let wire = Wire::new(move |_, _| exhausted());
        let layer = IncomingAttemptsLayer::new().switch(&switch);
        assert_eq!(layer.handle().mode(), mode);
        let mut request = told("left=1");
        request.headers_mut().insert(ENVOY, "4".parse().unwrap());
        let answer = layer_of(layer, wire.service()).oneshot(request).await.unwrap();
        assert_eq!((answer.headers().len(), switch.would_refuse()), (0, counted));
        assert!(wire.tasks()[0].is_none());
    }
}

// ----------------------------------------------------------------------------------------- who sees the mark

/// Wire calls of two stacks with a wire between them: the outer one sees heads only.
async fn marked(head: &'static [(&str, &str)], status: u16) -> (usize, f64, bool) {
    let wire = Wire::new(move |_, _| reply(status, head));
    let budget = RatioBudget::new(0.1).reserve(3, S(1_000_000));
    let task = Task::new(1);
    // A classifier that looks at the status alone does not hide the mark.
    let blunt = tower_herd::classify_head(|head| {
        (head.status != 200).then(|| tower_herd::Signal::new(tower_herd::Kind::Failed))
    });
    let stack = ServiceBuilder::new()
        .layer(JitteredRetryLayer::new().budget(budget.clone()).classify(blunt))
        .service(wire.service());
    stack.oneshot(of(&task, get())).await.unwrap();
    (wire.headers().len(), budget.balance(), task.is_exhausted())
}

#[tokio::test(start_paused = true)]
async fn who_sees_the_mark_neither_sends_again_nor_deposits() {
    for (head, status) in [
        (&[("x-should-retry", "false")][..], 503),
        (&[("grpc-status", "14"), ("grpc-retry-pushback-ms", "-1")], 503),
        (&[("grpc-status", "8"), ("grpc-retry-pushback-ms", "never")], 503),
    ] {
        assert_eq!(marked(head, status).await, (1, 3.0, true), "{head:?}");
    }
    let (calls, balance, _) =
        marked(&[("x-should-retry", "true"), ("grpc-retry-pushback-ms", "-1")], 503).await;
    assert_eq!(calls, 3, "a pushback is gRPC's word alone");
    assert!((balance - 1.1).abs() < 0.01, "one deposit, two repetitions: {balance}");
}

// ------------------------------------------------------------------------------------------------- refusals

#[tokio::test(start_paused = true)]
async fn refusals_as_replies_say_how_long_or_never() {
    let refusal = |kind, wait: Option<Duration>| -> BoxError {
        let at = wait.map(|wait| Instant::now() + wait);
        Box::new(Refusal::new(kind, "100 % of caf\u{e9}", Arc::from("p"), at))
    };
    use RefusalKind::*;
    for (kind, wait, http, grpc) in [
        (Paused, Some(Duration::from_micros(1_500_100)), (429, Some("2"), None), ("8", "1501")),
        (NoSlot, Some(MS(3)), (503, Some("1"), None), ("14", "3")),
        (Budget, None, (503, None, Some("false")), ("14", "-1")),
        // A terminal one that has an instant all the same.
        (Spend, Some(S(5)), (503, None, Some("false")), ("14", "-1")),
        (Exhausted, None, (503, None, Some("false")), ("14", "-1")),
    ] {
        let error = refusal(kind, wait);
        let plain: Response = error_reply(&*error);
        let seen = (
            plain.status().as_u16(),
            value(plain.headers(), "retry-after"),
            value(plain.headers(), "x-should-retry"),
        );
        assert_eq!(seen, (http.0, http.1.map(str::to_owned), http.2.map(str::to_owned)), "{kind:?}");
        let trailers: Response = grpc_error_reply(&*error);
        assert_eq!(trailers.status(), 200);
        assert_eq!(trailers.headers()["content-type"], "application/grpc");
        assert_eq!(trailers.headers()["grpc-status"], grpc.0);
        assert_eq!(trailers.headers()["grpc-retry-pushback-ms"], grpc.1, "{kind:?}");
        let message = value(trailers.headers(), "grpc-message").unwrap();
        assert!(message.contains("100 %25 of caf%C3%A9"), "{message}");
    }
}

#[test]
fn other_errors_as_replies() {
    let cut: BoxError = std::io::Error::from(std::io::ErrorKind::ConnectionReset).into();
    let late: BoxError = std::io::Error::from(std::io::ErrorKind::TimedOut).into();
    for (error, http, grpc) in [(cut, 502, "14"), (late, 504, "4")] {
        assert_eq!(error_reply::<String>(&*error).status(), http);
        assert_eq!(grpc_error_reply::<String>(&*error).headers()["grpc-status"], grpc);
    }
}

#[tokio::test(start_paused = true)]
async fn a_task_layer_outside_describes_the_task_that_is_narrowed() {
    let wire = Wire::new(|_, _| reply(200, &[]));
    let server = ServiceBuilder::new()
        .layer(TaskLayer::new().allowance(9).with(|_: &Request, task| task.caller("agent")))
        .layer(IncomingAttemptsLayer::new().allowance(8))
        .service(wire.service());
    server.oneshot(told("left=4")).await.unwrap();
    let task = wire.tasks().pop().unwrap().unwrap();
    assert_eq!((task.left(), task.caller_key()), (4, Some("agent".into())));
}
