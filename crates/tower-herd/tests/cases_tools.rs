//! Public reports about tools that ran twice, or for ever.
#![cfg(feature = "http")]

use std::{
    collections::HashMap,
    error::Error,
    future::Future,
    io,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::Duration,
};
use tokio::time::Instant;
use tower::{Layer, Service, ServiceBuilder, ServiceExt};
use tower_herd::{
    BoxError, Classify, ClassifyLayer, Executed, Fleet, FleetLimitLayer, HasTask, HashedFailover,
    IdempotencyKey, JitteredRetryLayer, Kind, Mode, Refusal, RefusalKind, RetryAfterLayer, Safety, Signal,
    Switch, Task, ToolCallsLayer, ToolHints, Trust,
    classify::signal_of_error,
    classify_fn,
    failover::Rung,
    idempotency_key,
    observe::{Event, Observe},
    retry::{Resent, Unlimited},
    tool_calls::Call,
};

/// A call of a tool that is no HTTP request.
#[derive(Clone)]
struct ToolCall {
    tool: &'static str,
    arguments: String,
    /// New with each call that a model makes.
    call_id: u32,
    hints: ToolHints,
    trust: Trust,
    key: Option<IdempotencyKey>,
    task: Option<Task>,
    resent: Option<Resent>,
}

fn tool(tool: &'static str, hints: ToolHints) -> ToolCall {
    ToolCall {
        tool,
        arguments: r#"{"cents":1200}"#.into(),
        call_id: 0,
        hints,
        trust: Trust::Vouched,
        key: None,
        task: Some(Task::new(1).deadline_in(Duration::from_secs(600))),
        resent: None,
    }
}

impl HasTask for ToolCall {
    fn task(&self) -> Option<&Task> {
        self.task.as_ref()
    }
    fn set_task(&mut self, task: Task) {
        self.task = Some(task);
    }
    fn safety(&self) -> Safety {
        let declared = self.hints.safety(self.trust);
        if self.key.is_some() { declared.with_key() } else { declared }
    }
    fn resent(&self) -> Option<&Resent> {
        self.resent.as_ref()
    }
    fn set_resent(&mut self, resent: Resent) {
        self.resent = Some(resent);
    }
}

/// What happens to a call at the server.
#[derive(Clone, Copy)]
enum Fate {
    Done,
    /// It runs, and the reply is lost.
    DoneAndLost,
    /// The connection breaks, and nobody knows when.
    Reset,
    /// There was no connection.
    NotReached,
    Busy,
    /// The arguments are wrong.
    Wrong,
}
use Fate::{Busy, Done, DoneAndLost, NotReached, Reset, Wrong};

/// A reply of the server, in words.
#[derive(Debug)]
struct ToolError(&'static str);
impl std::fmt::Display for ToolError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}
impl Error for ToolError {}

fn understand(outcome: Result<&String, &(dyn Error + 'static)>) -> Signal {
    let Err(error) = outcome else { return Signal::new(Kind::Success) };
    match error.downcast_ref().map(|ToolError(word)| *word) {
        Some("busy") => Signal::new(Kind::Throttled),
        Some("wrong") => Signal::new(Kind::Rejected),
        Some("in progress") => Signal::in_progress(),
        _ => signal_of_error(error),
    }
}

/// A server of tools: plays the fates, then only successes.
#[derive(Clone, Default)]
struct Server(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    fates: Vec<Fate>,
    /// Every call, and when it came.
    calls: Vec<(Instant, ToolCall)>,
    /// How often each effect took place; what bears a key takes place once.
    effects: u32,
    known: HashMap<IdempotencyKey, Instant>,
    /// How long a call with a key runs.
    takes: Duration,
}

impl Server {
    fn new(fates: impl IntoIterator<Item = Fate>) -> Self {
        let mut fates: Vec<_> = fates.into_iter().collect();
        fates.reverse();
        Server(Arc::new(Mutex::new(State { fates, ..State::default() })))
    }
    fn takes(self, time: Duration) -> Self {
        self.0.lock().unwrap().takes = time;
        self
    }
    fn calls(&self) -> usize {
        self.0.lock().unwrap().calls.len()
    }
    fn effects(&self) -> u32 {
        self.0.lock().unwrap().effects
    }
}

impl Service<ToolCall> for Server {
    type Response = String;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<String, BoxError>> + Send>>;
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }
    fn call(&mut self, call: ToolCall) -> Self::Future {
        let mut state = self.0.lock().unwrap();
        let now = Instant::now();
        let fate = state.fates.pop().unwrap_or(Done);
        let key = call.key;
        state.calls.push((now, call));
        let takes = state.takes;
        let ends = key.and_then(|key| state.known.get(&key).copied());
        let outcome = match (fate, ends) {
            (Reset, _) => Err(BoxError::from(io::Error::from(io::ErrorKind::ConnectionReset))),
            (NotReached, _) => Err(io::Error::from(io::ErrorKind::ConnectionRefused).into()),
            (Busy, _) => Err(ToolError("busy").into()),
            (Wrong, _) => Err(ToolError("wrong").into()),
            (_, Some(ends)) if ends > now => Err(ToolError("in progress").into()),
            (Done | DoneAndLost, known) => {
                if known.is_none() {
                    state.effects += 1;
                    if let Some(key) = key {
                        state.known.insert(key, now + takes);
                    }
                }
                match fate {
                    DoneAndLost => Err(io::Error::from(io::ErrorKind::ConnectionReset).into()),
                    _ => Ok("done".to_owned()),
                }
            }
        };
        Box::pin(async move { outcome })
    }
}

type Tools = tower::util::BoxCloneService<ToolCall, String, BoxError>;

/// Pause, limit and sensor of a server of tools, and retries around it.
fn stack(fleet: &Fleet, server: &Server) -> Tools {
    let retry = JitteredRetryLayer::new().budget(Unlimited).seed(1).classify(classify_fn(understand));
    Tools::new(retry.layer(rung(fleet, "tools", server)))
}

fn rung(fleet: &Fleet, name: &str, server: &Server) -> Tools {
    let provider = fleet.provider(name);
    Tools::new(
        ServiceBuilder::new()
            .layer(RetryAfterLayer::new(&provider).classify(classify_fn(understand)))
            .layer(FleetLimitLayer::new(&provider).classify(classify_fn(understand)).until_reply())
            .layer(ClassifyLayer::new(&provider).classify(classify_fn(understand)).replies())
            .service(server.clone()),
    )
}

const UNKNOWN: ToolHints = ToolHints::new();

// MervinPraison/PraisonAI#4256: a tool that is marked as not idempotent runs three times.
// langchain-ai/langchain#40688: repeated by default, and then once more by the model.
#[tokio::test(start_paused = true)]
async fn praisonai_4256_langchain_40688_whether_a_tool_runs_again_is_for_its_hints_and_the_evidence() {
    let reads = ToolHints::new().read_only(true);
    let idempotent = ToolHints::new().idempotent(true).destructive(true);
    let adds = ToolHints::new().destructive(false);
    let no = ToolHints::new().idempotent(false);
    for (hints, trust, fate, calls) in [
        // Nobody knows whether it ran.
        (reads, Trust::Vouched, Reset, 2),
        (idempotent, Trust::Vouched, Reset, 2),
        (adds, Trust::Vouched, Reset, 1),
        (no, Trust::Vouched, Reset, 1),
        (UNKNOWN, Trust::Vouched, Reset, 1),
        (UNKNOWN, Trust::Vouched, DoneAndLost, 1),
        // What a server says of itself counts only where somebody answers for it.
        (reads, Trust::Untrusted, Reset, 1),
        (idempotent, Trust::Untrusted, DoneAndLost, 1),
        // It did not run: that is said by the evidence, not by the hints.
        (no, Trust::Vouched, NotReached, 2),
        (UNKNOWN, Trust::Untrusted, NotReached, 2),
        (UNKNOWN, Trust::Untrusted, Busy, 2),
        // The request is at fault.
        (reads, Trust::Vouched, Wrong, 1),
    ] {
        let server = Server::new([fate]);
        let call = ToolCall { trust, ..tool("t", hints) };
        let safety = call.safety();
        let outcome = stack(&Fleet::local().seed(1), &server).oneshot(call).await;
        assert_eq!(server.calls(), calls, "{hints:?} {trust:?}");
        assert_eq!(outcome.is_ok(), calls == 2);
        if let Err(error) = outcome {
            // The caller can tell what to say to the model.
            let in_doubt = safety.is_in_doubt(&understand(Err(&*error)));
            assert_eq!(in_doubt, matches!(fate, Reset | DoneAndLost), "{error}");
        }
    }
}

// A ladder is no way around it: nor is a tool repeated at another server.
#[tokio::test(start_paused = true)]
async fn langchain_40688_a_tool_that_may_have_run_is_not_run_elsewhere() {
    for (hints, fate, calls) in [
        (UNKNOWN, Reset, [1, 0]),
        (UNKNOWN, NotReached, [1, 1]),
        (ToolHints::new().read_only(true), Reset, [1, 1]),
        // Idempotent at one server says nothing about another: it is repeated where it was.
        (ToolHints::new().idempotent(true), Reset, [2, 0]),
    ] {
        let fleet = Fleet::local().seed(1);
        let servers = [Server::new([fate]), Server::default()];
        let rungs = servers.iter().zip(["a", "b"]).enumerate();
        let rungs = rungs.map(|(tier, (server, name))| {
            Rung::new(&fleet.provider(name), rung(&fleet, name, server)).tier(tier as u32)
        });
        let ladder = HashedFailover::new(rungs).unwrap().classify(classify_fn(understand));
        let retry = JitteredRetryLayer::new().budget(Unlimited).seed(1).classify(classify_fn(understand));
        retry.layer(ladder).oneshot(tool("t", hints)).await.ok();
        assert_eq!(servers.each_ref().map(Server::calls), calls, "{hints:?}");
    }
}

/// A model's calls of one task, with the memory of it.
fn remembering<S>(fleet: &Fleet, switch: &Switch, inner: S) -> Tools
where
    S: Service<ToolCall, Response = String, Error = BoxError> + Clone + Send + 'static,
    S::Future: Send,
{
    let layer = ToolCallsLayer::new(&fleet.provider("tools"), |call: &ToolCall| {
        // By what is called with what for which step, never by the model's id.
        Some(Call::new(call.tool, &call.arguments, "step 1"))
    });
    let layer = layer.failures(3).calls(20).classify(classify_fn(understand)).switch(switch);
    Tools::new(layer.layer(inner))
}

// langchain-ai/langchain#40688, openai/openai-agents-python#4254: told that the call failed, the model calls
// again, with an id of its own making and the arguments in another order.
#[tokio::test(start_paused = true)]
async fn openai_agents_python_4254_a_model_that_calls_again_is_answered_here() {
    let fleet = Fleet::local().seed(1);
    let server = Server::new([DoneAndLost]);
    let mut tools = remembering(&fleet, &Switch::default(), stack(&fleet, &server));
    let first = ToolCall { arguments: r#"{"to":"x","cents":1200}"#.into(), ..tool("pay", UNKNOWN) };
    tools.ready().await.unwrap().call(first.clone()).await.unwrap_err();
    for call_id in 1..4 {
        let arguments = r#"{ "cents": 1200, "to": "x" }"#.into();
        let again = ToolCall { call_id, arguments, ..first.clone() };
        let no = tools.ready().await.unwrap().call(again).await.unwrap_err();
        let no = Refusal::find(&*no).unwrap();
        assert_eq!((no.kind, no.retry_at), (RefusalKind::Exhausted, None));
        assert!(no.why.contains("may have taken effect"), "{no}");
    }
    assert_eq!((server.calls(), server.effects()), (1, 1));
    // Another payment is another call; and so is the same one for another task.
    let other = ToolCall { arguments: r#"{"to":"y","cents":1200}"#.into(), ..first.clone() };
    tools.ready().await.unwrap().call(other).await.unwrap();
    let elsewhere = ToolCall { task: Some(Task::new(2)), ..first };
    tools.ready().await.unwrap().call(elsewhere).await.unwrap();
    assert_eq!(server.effects(), 3);
}

// The same where the server knows keys: calling again, by whomever, finds the first call.
#[tokio::test(start_paused = true)]
async fn openai_agents_python_4254_with_a_key_calling_again_is_looking_it_up() {
    let fleet = Fleet::local().seed(1);
    let server = Server::new([DoneAndLost, DoneAndLost]);
    let mut tools = remembering(&fleet, &Switch::default(), stack(&fleet, &server));
    for (call_id, arguments) in [r#"{"cents":1200}"#, r#"{ "cents": 1200.0 }"#].into_iter().enumerate() {
        let call = ToolCall {
            call_id: call_id as u32,
            arguments: arguments.into(),
            key: Some(idempotency_key("pay", arguments, "step 1")),
            ..tool("pay", UNKNOWN)
        };
        assert_eq!(tools.ready().await.unwrap().call(call).await.unwrap(), "done");
    }
    assert_eq!((server.calls(), server.effects()), (4, 1), "twice lost, and found");
    let ids: Vec<_> = server.0.lock().unwrap().calls.iter().map(|(_, call)| call.call_id).collect();
    assert_eq!(ids, [0, 0, 0, 1], "ids differ, and are no key");
}

// A call that is dropped while it runs may run on.
#[tokio::test(start_paused = true)]
async fn langchain_40688_a_call_that_was_given_up_is_in_doubt() {
    let fleet = Fleet::local().seed(1);
    let slow = tower::service_fn(|_: ToolCall| async {
        tokio::time::sleep(Duration::from_secs(5)).await;
        Ok::<_, BoxError>("done".to_owned())
    });
    let tools = remembering(&fleet, &Switch::default(), slow);
    let call = tool("pay", UNKNOWN);
    let given_up = tokio::time::timeout(Duration::from_secs(1), tools.clone().oneshot(call.clone())).await;
    assert!(given_up.is_err());
    assert!(Refusal::find(&*tools.clone().oneshot(call.clone()).await.unwrap_err()).is_some());
    // A read is not.
    let read = ToolCall { hints: ToolHints::new().read_only(true), ..call };
    assert!(tools.oneshot(read).await.is_ok());
}

// NousResearch/hermes-agent#91713: five hours in a loop of a tool that fails and a model that calls it.
#[tokio::test(start_paused = true)]
async fn hermes_agent_91713_a_futile_loop_ends() {
    let fleet = Fleet::local().seed(1);
    let server = Server::new([Wrong; 1000]);
    let mut tools = remembering(&fleet, &Switch::default(), stack(&fleet, &server));
    let task = Task::new(1).deadline_in(Duration::from_secs(6 * 3600));
    let mut refused = 0;
    for round in 0..500 {
        // New arguments each time: no two calls are the same.
        let arguments = format!(r#"{{"try":{round}}}"#);
        let call =
            ToolCall { arguments, call_id: round, task: Some(task.clone()), ..tool("search", UNKNOWN) };
        let no = tools.ready().await.unwrap().call(call).await.unwrap_err();
        refused += u32::from(Refusal::find(&*no).is_some_and(|no| no.why.contains("too often in a row")));
    }
    assert_eq!((server.calls(), refused), (3, 497));
    // Another tool of the same task is not locked, but a task may not call for ever either.
    let server = Server::default();
    let mut tools = remembering(&fleet, &Switch::default(), stack(&fleet, &server));
    let mut passed = 0;
    for round in 0..100 {
        let arguments = format!(r#"{{"try":{round}}}"#);
        let call = ToolCall { arguments, task: Some(task.clone()), ..tool("read", UNKNOWN) };
        passed += u32::from(tools.ready().await.unwrap().call(call).await.is_ok());
    }
    assert_eq!((passed, server.calls()), (17, 17), "with the three above, twenty");
    let call = ToolCall { task: None, ..tool("read", UNKNOWN) };
    assert!(tools.ready().await.unwrap().call(call).await.is_ok(), "of no task nothing is remembered");
}

#[tokio::test(start_paused = true)]
async fn the_memory_of_tool_calls_can_be_watched_and_turned_off() {
    #[derive(Clone, Default)]
    struct Seen(Arc<Mutex<[u32; 2]>>);
    impl Observe for Seen {
        fn observe(&self, event: &Event<'_>) {
            match event {
                Event::Refused { .. } => self.0.lock().unwrap()[0] += 1,
                Event::WouldRefuse { .. } => self.0.lock().unwrap()[1] += 1,
                _ => {}
            }
        }
    }
    for (mode, calls, events, counted) in
        [(Mode::Enforce, 1, [3, 0], 0), (Mode::Observe, 4, [0, 3], 3), (Mode::Off, 4, [0, 0], 0)]
    {
        let seen = Seen::default();
        let fleet = Fleet::local().seed(1).observer(seen.clone());
        let server = Server::new([Reset; 9]);
        let switch = Switch::new(mode);
        let mut tools = remembering(&fleet, &switch, stack(&fleet, &server));
        for _ in 0..4 {
            tools.ready().await.unwrap().call(tool("pay", UNKNOWN)).await.ok();
        }
        // Each call had a task of its own: nothing to remember.
        assert_eq!((server.calls(), switch.would_refuse()), (4, 0));

        let server = Server::new([Reset; 9]);
        let mut tools = remembering(&fleet, &switch, stack(&fleet, &server));
        let call = tool("pay", UNKNOWN);
        for _ in 0..4 {
            tools.ready().await.unwrap().call(call.clone()).await.ok();
        }
        assert_eq!((server.calls(), switch.would_refuse()), (calls, counted), "{mode:?}");
        assert_eq!(*seen.0.lock().unwrap(), events, "{mode:?}");
    }
}

// The key is in flight: its reply is asked for, by the clock and not by the attempt.
#[tokio::test(start_paused = true)]
async fn a_key_in_flight_is_asked_for_until_its_reply_is_there() {
    // The first reply is lost at once; the call runs 4 s.
    let server = Server::new([DoneAndLost]).takes(Duration::from_secs(4));
    let fleet = Fleet::local().seed(1);
    let task = Task::new(1).allowance(2).deadline_in(Duration::from_secs(600));
    let key = Some(idempotency_key("pay", "{}", "step"));
    let call = ToolCall { key, task: Some(task.clone()), ..tool("pay", UNKNOWN) };
    let start = Instant::now();
    assert_eq!(stack(&fleet, &server).oneshot(call.clone()).await.unwrap(), "done");
    assert!(start.elapsed() >= Duration::from_secs(4));
    assert!(server.calls() > 3, "asked several times: {}", server.calls());
    assert_eq!((server.effects(), task.spent()), (1, 1), "only the lost one was charged");
    assert_eq!(task.redelivered() as usize, server.calls() - 2);

    // Not for ever: as often as a throttled one, and not beyond the deadline.
    for time in [36_000, 5] {
        let server = Server::new([DoneAndLost]).takes(Duration::from_secs(7200));
        let task = Task::new(1).deadline_in(Duration::from_secs(time));
        let call = ToolCall { task: Some(task.clone()), ..call.clone() };
        let start = Instant::now();
        let error = stack(&fleet, &server).oneshot(call).await.unwrap_err();
        assert_eq!(error.to_string(), "in progress", "the last real reply");
        assert!(start.elapsed() < Duration::from_secs(time), "{:?}", start.elapsed());
        // The lost one, its repetition, and ten questions.
        assert!(server.calls() <= 12, "{}", server.calls());
    }
}

/// The same over HTTP, with the default classifier.
#[tokio::test(start_paused = true)]
async fn a_409_is_a_conflict_unless_it_says_that_the_key_is_in_flight() {
    const STRIPE: &str = r#"{"error":{"type":"idempotency_error","code":"idempotency_key_in_use"}}"#;
    const DRAFT: &str = r#"{"title":"A request is outstanding for this Idempotency-Key"}"#;
    const CONFLICT: &str = r#"{"error":{"code":"already_exists","message":"There is one with this number"}}"#;
    for (method, key, body, wait, calls) in [
        ("POST", true, STRIPE, None, 3),
        ("POST", true, DRAFT, None, 3),
        ("POST", true, "", Some("2"), 3),
        ("POST", true, CONFLICT, None, 1),
        ("POST", true, "", None, 1),
        ("POST", true, "", Some("0"), 1),
        // Without a key it is the server that errs: nothing is repeated.
        ("POST", false, STRIPE, None, 1),
        ("POST", false, "", Some("2"), 1),
        ("PUT", false, CONFLICT, None, 1),
        ("PUT", false, "", None, 1),
    ] {
        let provider = Fleet::local().seed(1).provider("p");
        let seen = Arc::new(Mutex::new(vec![]));
        let inner = {
            let seen = seen.clone();
            tower::service_fn(move |_: http::Request<String>| {
                let mut seen = seen.lock().unwrap();
                seen.push(Instant::now());
                let in_flight = seen.len() < 3;
                let mut reply = http::Response::builder().status(if in_flight { 409 } else { 200 });
                if let Some(wait) = wait.filter(|_| in_flight) {
                    reply = reply.header("retry-after", wait);
                }
                let body = http_body_util::Full::new(bytes::Bytes::from_static(body.as_bytes()));
                std::future::ready(Ok::<_, BoxError>(reply.body(body).unwrap()))
            })
        };
        // A budget with nothing in it: what is asked for again needs none.
        let broke = tower_herd::RatioBudget::new(0.0).reserve(0, Duration::from_secs(1));
        let stack = ServiceBuilder::new()
            .layer(JitteredRetryLayer::new().budget(broke).seed(1))
            .layer(ClassifyLayer::new(&provider))
            .service(inner);
        let mut request = http::Request::builder().method(method).uri("http://pay.example/");
        if key {
            request = request.header("idempotency-key", idempotency_key("pay", "{}", "1").to_string());
        }
        let mut request = request.body(String::new()).unwrap();
        let task = Task::new(1).allowance(1);
        request.set_task(task.clone());
        let reply = stack.oneshot(request).await.unwrap();
        let seen = seen.lock().unwrap();
        assert_eq!(seen.len(), calls, "{method} {key} {body} {wait:?}");
        assert_eq!(reply.status(), if calls == 3 { 200 } else { 409 });
        assert_eq!((task.spent(), task.redelivered()), (0, calls as u32 - 1));
        let least = Duration::from_secs(if wait == Some("2") { 2 } else { 0 });
        assert!(seen.windows(2).all(|two| two[1] - two[0] >= least), "never earlier than the server says");
        assert!(provider.paused_until().is_none(), "nobody else waits for it");
    }
}

/// A ladder of rungs, tier by tier, with their domains; how often each was called.
async fn walk(
    rungs: &[(Option<&'static str>, &[Fate])],
    with_task: bool,
    retries: u32,
) -> (Result<String, BoxError>, Vec<usize>) {
    let fleet = Fleet::local().seed(1);
    let servers: Vec<_> = rungs.iter().map(|(_, fates)| Server::new(fates.iter().copied())).collect();
    let ladder = servers.iter().enumerate().map(|(tier, server)| {
        let name = format!("rung-{tier}");
        let rung = Rung::new(&fleet.provider(&name), rung(&fleet, &name, server)).tier(tier as u32);
        match rungs[tier].0 {
            Some(domain) => rung.domain(domain),
            None => rung,
        }
    });
    let ladder = HashedFailover::new(ladder).unwrap().classify(classify_fn(understand));
    let retry = JitteredRetryLayer::new()
        .attempts(retries)
        .budget(Unlimited)
        .seed(1)
        .classify(classify_fn(understand));
    let mut call = ToolCall { key: Some(idempotency_key("pay", "{}", "1")), ..tool("pay", UNKNOWN) };
    if !with_task {
        call.task = None;
    }
    let outcome = retry.layer(ladder).oneshot(call).await;
    (outcome, servers.iter().map(Server::calls).collect())
}

// Law 4: a key is worth something where it is known.
#[tokio::test(start_paused = true)]
async fn a_keyed_write_moves_inside_its_domain_only() {
    const PAY: Option<&str> = Some("payments");
    const ALL_RESET: &[Fate] = &[Reset; 9];
    // Straight to the other region, past the rung that knows nothing of the key.
    let (outcome, calls) = walk(&[(PAY, ALL_RESET), (None, &[]), (PAY, &[])], true, 1).await;
    assert_eq!((outcome.unwrap(), calls), ("done".into(), vec![1, 0, 1]));
    // Another domain is none, and no domain is no domain.
    for other in [None, Some("search")] {
        let (outcome, calls) = walk(&[(PAY, ALL_RESET), (other, &[])], true, 3).await;
        assert_eq!((outcome.is_ok(), calls), (false, vec![3, 0]));
    }
    // Once it may have run, no later reply opens the way out: not a 429 that proves itself not executed, ...
    let (outcome, calls) = walk(&[(PAY, ALL_RESET), (PAY, &[NotReached; 9]), (None, &[])], true, 3).await;
    assert_eq!((outcome.is_ok(), calls[2]), (false, 0));
    assert!(calls[0] + calls[1] >= 2);
    // ... while before that it may go anywhere.
    let (outcome, calls) = walk(&[(PAY, &[NotReached]), (None, &[])], true, 1).await;
    assert_eq!((outcome.is_ok(), calls), (true, vec![1, 1]));
    // Without a task nobody remembers: a walk stays, and a repetition is made only where all rungs know the key.
    let (outcome, calls) = walk(&[(PAY, ALL_RESET), (PAY, &[])], false, 1).await;
    assert_eq!((outcome.is_ok(), calls), (false, vec![1, 0]));
    let (outcome, calls) = walk(&[(PAY, ALL_RESET), (None, &[])], false, 3).await;
    assert_eq!((outcome.is_ok(), calls), (false, vec![1, 0]));
    let (outcome, calls) = walk(&[(PAY, &[Reset]), (PAY, &[])], false, 3).await;
    assert_eq!((outcome.is_ok(), calls), (true, vec![2, 0]));
}

#[test]
fn in_progress_is_a_no_for_who_must_not_repeat() {
    let signal = understand(Err(&ToolError("in progress")));
    assert_eq!((signal.kind, signal.executed), (Kind::Rejected, Executed::Maybe));
    assert!(!Safety::Once.allows(&signal, true) && Safety::Keyed.allows(&signal, true));
    assert!(!Safety::Keyed.allows(&signal, false), "elsewhere the key is unknown");
    let classify = classify_fn(understand);
    assert!(!classify.exhausted(&String::new()));
}
