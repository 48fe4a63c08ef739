//! Tools that are no HTTP: an agent, its tool server behind a pipe, and what happens when that fails.
//!
//! ```text
//! cargo run --example tools
//! ```
//!
//! The server speaks JSON lines over a pipe, as a Model Context Protocol server does over stdio, and fails the
//! ways real ones do: it is busy, it breaks after it has charged, it takes long, it rejects. The client sends
//! each call through the layers below, and the program checks at the server what took effect how often.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::{
    collections::HashMap,
    error::Error,
    fmt,
    future::Future,
    io,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, DuplexStream, duplex},
    time::{Instant, sleep},
};
use tower::{Service, ServiceBuilder, ServiceExt, util::BoxCloneService};
use tower_herd::{
    AttemptTimeoutLayer, BoxError, ClassifyLayer, Fleet, FleetLimitLayer, HasTask, IdempotencyKey,
    JitteredRetryLayer, Kind, NotExecuted, Provider, ProviderSettings, Pushback, RatioBudget, Refusal,
    RetryAfterLayer, Safety, Signal, Task, ToolCallsLayer, ToolHints, Trust, classify::signal_of_error,
    classify_fn, idempotency_key, retry::Resent, tool_calls::Call,
};

/// What the layers see: a request of this program's own.
#[derive(Clone)]
struct ToolCall {
    tool: &'static str,
    arguments: String,
    /// What the server declares of the tool, and whether this program's operator answers for the server.
    hints: ToolHints,
    trust: Trust,
    /// Made for servers that know keys.
    key: Option<IdempotencyKey>,
    task: Option<Task>,
    resent: Option<Resent>,
}

impl HasTask for ToolCall {
    fn safety(&self) -> Safety {
        let declared = self.hints.safety(self.trust);
        if self.key.is_some() { declared.with_key() } else { declared }
    }
    fn task(&self) -> Option<&Task> {
        self.task.as_ref()
    }
    fn set_task(&mut self, task: Task) {
        self.task = Some(task);
    }
    fn resent(&self) -> Option<&Resent> {
        self.resent.as_ref()
    }
    fn set_resent(&mut self, resent: Resent) {
        self.resent = Some(resent);
    }
}

/// An error that the server has sent.
#[derive(Debug, Deserialize, Serialize)]
struct ToolError {
    code: String,
    retry_after_ms: Option<u64>,
}
impl fmt::Display for ToolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.code)
    }
}
impl Error for ToolError {}

/// The one thing to write for a protocol of one's own: what its replies mean.
fn understand(outcome: Result<&Value, &(dyn Error + 'static)>) -> Signal {
    let Err(error) = outcome else { return Signal::new(Kind::Success) };
    match error.downcast_ref::<ToolError>() {
        Some(ToolError { code, retry_after_ms }) => {
            let wait = retry_after_ms.map(Duration::from_millis);
            let pushback = wait.map_or(Pushback::None, Pushback::After);
            match &**code {
                "busy" => Signal::new(Kind::Throttled).with_pushback(pushback),
                "in_progress" => Signal::in_progress().with_pushback(pushback),
                "invalid" => Signal::new(Kind::Rejected),
                _ => Signal::new(Kind::Failed),
            }
        }
        // A pipe that broke, a timeout: nobody knows. No pipe at all: proof that nothing happened.
        None => signal_of_error(error),
    }
}

/// The client: each call gets a connection to the server.
#[derive(Clone)]
struct Client(Server);

impl Service<ToolCall> for Client {
    type Response = Value;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Value, BoxError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, call: ToolCall) -> Self::Future {
        let pipe = self.0.connect(call.tool);
        Box::pin(async move {
            let mut pipe = BufReader::new(pipe.map_err(NotExecuted::new)?);
            let arguments: Value = serde_json::from_str(&call.arguments)?;
            let key = call.key.map(|key| key.to_string());
            let line = json!({ "tool": call.tool, "arguments": arguments, "idempotency_key": key });
            pipe.write_all(format!("{line}\n").as_bytes()).await?;
            let mut reply = String::new();
            if pipe.read_line(&mut reply).await? == 0 {
                return Err(io::Error::from(io::ErrorKind::ConnectionReset).into());
            }
            let mut reply: Value = serde_json::from_str(&reply)?;
            match reply.get_mut("error").map(Value::take) {
                Some(error) => Err(serde_json::from_value::<ToolError>(error)?.into()),
                None => Ok(reply["result"].take()),
            }
        })
    }
}

/// What happens to a call at the server.
#[derive(Clone, Copy, PartialEq)]
enum Fate {
    Answered,
    NotReached,
    Busy(u64),
    /// It runs, and the pipe breaks before the reply is out.
    BreaksAfter,
    /// It runs for so long, and forgets to answer before the client gives up.
    Hangs(u64),
    Invalid,
}

/// The server of tools, and what took effect there.
#[derive(Clone, Default)]
struct Server(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// What happens to the next calls of a tool.
    fates: HashMap<String, Vec<Fate>>,
    calls: HashMap<String, u32>,
    effects: HashMap<String, u32>,
    /// Until when the call with a key runs, or ran.
    keys: HashMap<String, Instant>,
}

impl Server {
    fn next(&self, tool: &str, fates: &[Fate]) {
        let fates = fates.iter().rev().copied().collect();
        self.0.lock().unwrap().fates.insert(tool.to_owned(), fates);
    }

    fn seen(&self, tool: &str) -> (u32, u32) {
        let state = self.0.lock().unwrap();
        (state.calls.get(tool).copied().unwrap_or(0), state.effects.get(tool).copied().unwrap_or(0))
    }

    fn connect(&self, tool: &str) -> io::Result<DuplexStream> {
        let mut state = self.0.lock().unwrap();
        let next = state.fates.get_mut(tool).and_then(|fates| fates.pop_if(|fate| *fate == Fate::NotReached));
        if next.is_some() {
            return Err(io::ErrorKind::NotFound.into());
        }
        let (ours, theirs) = duplex(4096);
        tokio::spawn(self.clone().serve(theirs));
        Ok(ours)
    }

    /// One connection. It goes on where the client has left: a timeout over there stops nothing here.
    async fn serve(self, pipe: DuplexStream) -> io::Result<()> {
        let mut pipe = BufReader::new(pipe);
        let mut line = String::new();
        pipe.read_line(&mut line).await?;
        let call: Value = serde_json::from_str(&line)?;
        let tool = call["tool"].as_str().unwrap_or_default().to_owned();
        let Some((fate, reply)) = self.run(&tool, &call) else { return Ok(()) };
        if let Fate::Hangs(millis) = fate {
            sleep(Duration::from_millis(millis)).await;
        }
        pipe.write_all(format!("{reply}\n").as_bytes()).await
    }

    /// Makes the call. None: the reply is lost.
    fn run(&self, tool: &str, call: &Value) -> Option<(Fate, Value)> {
        let mut state = self.0.lock().unwrap();
        *state.calls.entry(tool.to_owned()).or_default() += 1;
        let fate = state.fates.get_mut(tool).and_then(Vec::pop).unwrap_or(Fate::Answered);
        let error = |code: &str, wait: Option<u64>| json!({ "error": ToolError { code: code.to_owned(), retry_after_ms: wait } });
        match fate {
            Fate::Busy(wait) => return Some((fate, error("busy", Some(wait)))),
            Fate::Invalid => return Some((fate, error("invalid", None))),
            _ => {}
        }
        let now = Instant::now();
        let took = if let Fate::Hangs(millis) = fate { millis } else { 0 };
        let is_known = match call["idempotency_key"].as_str() {
            None => false,
            Some(key) => match state.keys.get(key) {
                Some(end) if *end > now => return Some((fate, error("in_progress", None))),
                Some(_) => true,
                None => {
                    state.keys.insert(key.to_owned(), now + Duration::from_millis(took));
                    false
                }
            },
        };
        if !is_known {
            *state.effects.entry(tool.to_owned()).or_default() += 1;
        }
        (fate != Fate::BreaksAfter).then(|| (fate, json!({ "result": "ok" })))
    }
}

type Tools = BoxCloneService<ToolCall, Value, BoxError>;

fn stack(provider: &Provider, server: &Server) -> Tools {
    let understand = classify_fn(understand);
    let remembered = |call: &ToolCall| Some(Call::new(call.tool, &call.arguments, "step 1"));
    // The stories below need four repetitions for a dozen calls: more than a budget of 10 % allows.
    let budget = RatioBudget::default().reserve(10, Duration::from_secs(10));
    BoxCloneService::new(
        ServiceBuilder::new()
            .layer(ToolCallsLayer::new(provider, remembered).failures(3).classify(understand))
            .layer(
                JitteredRetryLayer::new().base(Duration::from_millis(50)).budget(budget).classify(understand),
            )
            .layer(RetryAfterLayer::new(provider).classify(understand))
            .layer(FleetLimitLayer::new(provider).classify(understand).until_reply())
            .layer(ClassifyLayer::new(provider).classify(understand).replies())
            .layer(AttemptTimeoutLayer::new(Duration::from_millis(200)).replies())
            .service(Client(server.clone())),
    )
}

struct Agent {
    tools: Tools,
    server: Server,
}

impl Agent {
    /// Calls, says what came of it, and holds it against what was expected: calls that reached the server,
    /// and effects there.
    async fn call(&mut self, story: &str, call: ToolCall, expected: (u32, u32)) -> Result<Value, BoxError> {
        let (tool, safety) = (call.tool, call.safety());
        let start = Instant::now();
        let outcome = self.tools.ready().await?.call(call).await;
        let seen = self.server.seen(tool);
        let what = match &outcome {
            Ok(_) => "answered".to_owned(),
            Err(error) => match Refusal::find(&**error) {
                Some(refusal) => format!("refused: {}", refusal.why),
                // What to tell a model is another thing than "failed, try again".
                None if safety.is_in_doubt(&understand(Err(&**error))) => format!("in doubt: {error}"),
                None => format!("failed: {error}"),
            },
        };
        println!("{story}");
        println!(
            "    {tool} is {safety:?}: {} calls, {} effects in all, {} ms; {what}",
            seen.0,
            seen.1,
            start.elapsed().as_millis()
        );
        assert_eq!(seen, expected, "{story}: calls and effects");
        outcome
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), BoxError> {
    let settings = ProviderSettings::new().ceiling(4);
    let provider = Fleet::local().configure("tool-server", settings)?;
    let server = Server::default();
    let mut agent = Agent { tools: stack(&provider, &server), server: server.clone() };
    // Each story is a piece of work; all calls of one share a deadline, an allowance and a memory.
    let task = || Some(Task::new("story").deadline_in(Duration::from_secs(20)));
    let call = |tool, hints: &str| {
        let hints: ToolHints = serde_json::from_str(hints).expect("as in the server's list of tools");
        let arguments = r#"{"order":7,"cents":1200}"#.to_owned();
        ToolCall { tool, arguments, hints, trust: Trust::Vouched, key: None, task: task(), resent: None }
    };

    server.next("search", &[Fate::BreaksAfter]);
    let search = call("search", r#"{"readOnlyHint":true}"#);
    agent.call("A read whose reply is lost is made again.", search.clone(), (2, 2)).await?;

    server.next("search", &[Fate::Busy(300)]);
    let start = Instant::now();
    agent.call("A busy server says how long, and is given that time.", search, (4, 3)).await?;
    assert!(start.elapsed() >= Duration::from_millis(300), "never early");

    server.next("charge", &[Fate::NotReached]);
    let charge = call("charge", "{}");
    agent.call("A write that did not get there is made again: that is proof.", charge, (1, 1)).await?;

    server.next("pay", &[Fate::BreaksAfter]);
    let pay = call("pay", r#"{"destructiveHint":false}"#);
    let lost = agent.call("A write whose reply is lost is not: it has charged.", pay.clone(), (1, 1)).await;
    assert!(lost.is_err_and(|error| Safety::Once.is_in_doubt(&understand(Err(&*error)))));
    let again = ToolCall { arguments: r#"{ "cents": 1200.0, "order": 7 }"#.to_owned(), ..pay.clone() };
    let no = agent.call("Nor when the model calls again, in other words.", again, (1, 1)).await;
    assert!(no.is_err_and(|error| Refusal::find(&*error).is_some()));

    server.next("wipe", &[Fate::BreaksAfter]);
    let liar = ToolCall { trust: Trust::Untrusted, ..call("wipe", r#"{"readOnlyHint":true}"#) };
    let no = agent.call("A stranger's server calls its tool read-only: not believed.", liar, (1, 1)).await;
    assert!(no.is_err());

    server.next("transfer", &[Fate::BreaksAfter]);
    let transfer = call("transfer", "{}");
    let key = idempotency_key(transfer.tool, &transfer.arguments, "step 1");
    let transfer = ToolCall { key: Some(key), ..transfer };
    agent.call("With a key the server knows the second call for the first.", transfer, (2, 1)).await?;

    server.next("order", &[Fate::Hangs(900)]);
    let order = call("order", "{}");
    let task = order.task.clone().expect("it has one");
    let order = ToolCall { key: Some(idempotency_key("order", &order.arguments, "step 1")), ..order };
    let start = Instant::now();
    let story = "A timeout while it runs: asked for under the same key until it is done.";
    let tools = agent.tools.clone();
    tools.oneshot(order).await?;
    let (calls, effects) = server.seen("order");
    println!(
        "{story}\n    order is Keyed: {calls} calls, {effects} effects in all, {} ms",
        start.elapsed().as_millis()
    );
    assert!(start.elapsed() >= Duration::from_millis(900) && effects == 1 && calls > 2);
    assert_eq!(task.spent(), 1, "only the timeout was charged to the task");

    server.next("lookup", &[Fate::Invalid; 100]);
    let lookup = call("lookup", r#"{"readOnlyHint":true}"#);
    let mut refused = 0;
    for round in 0..100 {
        let arguments = format!(r#"{{"try":{round}}}"#);
        let outcome = agent.tools.clone().oneshot(ToolCall { arguments, ..lookup.clone() }).await;
        refused += u32::from(outcome.is_err_and(|error| Refusal::find(&*error).is_some()));
    }
    let (calls, _) = server.seen("lookup");
    println!(
        "A model that goes round in circles is told so.\n    lookup: {calls} of 100 calls reached the server"
    );
    assert_eq!((calls, refused), (3, 97));
    assert_eq!(provider.in_flight(), 0, "no slot is left behind");
    Ok(())
}
