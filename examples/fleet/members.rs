//! The members of the fleet, as who started them sees them: processes, or threads of this one.

use std::{
    ffi::OsString,
    path::PathBuf,
    process::Stdio,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    process::{Child, ChildStdin, ChildStdout, Command},
    sync::oneshot,
    time::timeout,
};
use tower_herd::store::MemoryStore;

use crate::worker::{Orders, Status, work};

/// How members are started.
pub enum Launch {
    /// A process each: this program, which reads its orders.
    Processes { program: PathBuf, arguments: Vec<OsString> },
    /// A thread with a runtime each, and this store.
    Threads(MemoryStore),
}

/// What has become of a member.
#[derive(Clone, Debug, PartialEq)]
pub enum Life {
    Runs,
    Stopped,
    Killed,
    /// It ended by itself, before it was told to.
    Ended(String),
}

/// One of them. Dropped, its process is killed.
pub struct Member {
    body: Body,
    seen: Arc<Mutex<(Life, Status)>>,
}

enum Body {
    Process { child: Child, input: Option<ChildStdin> },
    Thread { end: Option<oneshot::Sender<()>>, thread: Option<thread::JoinHandle<()>> },
}

impl Launch {
    /// This program, as a member.
    pub fn myself() -> Result<Self, String> {
        let program =
            std::env::current_exe().map_err(|e| format!("this program does not find itself ({e})"))?;
        Ok(Launch::Processes { program, arguments: vec!["--worker".into()] })
    }

    /// Starts a member.
    pub async fn start(&self, orders: Orders) -> Result<Member, String> {
        let seen = Arc::new(Mutex::new((Life::Runs, Status::default())));
        let body = match self {
            Launch::Processes { program, arguments } => {
                let mut command = Command::new(program);
                command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
                // Ctrl-C is for this process alone, which then ends the others. And should it be killed, the system
                // continues a member that is stopped, which then sees the end of its input.
                #[cfg(unix)]
                command.process_group(0);
                let failed = |e| format!("no process for a member ({e})");
                let mut child = command.spawn().map_err(failed)?;
                let (Some(mut input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
                    return Err("a member without pipes".into());
                };
                let orders = serde_json::to_string(&orders).map_err(|e| e.to_string())? + "\n";
                input.write_all(orders.as_bytes()).await.map_err(failed)?;
                tokio::spawn(listen(output, seen.clone()));
                Body::Process { child, input: Some(input) }
            }
            Launch::Threads(store) => {
                let (end, over) = oneshot::channel::<()>();
                let (store, seen) = (store.clone(), seen.clone());
                let thread = thread::Builder::new().name(format!("worker {}", orders.number + 1));
                let thread = thread.spawn(move || in_a_thread(orders, store, over, &seen));
                let thread = thread.map_err(|e| format!("no thread for a member ({e})"))?;
                Body::Thread { end: Some(end), thread: Some(thread) }
            }
        };
        Ok(Member { body, seen })
    }
}

fn in_a_thread(
    orders: Orders,
    store: MemoryStore,
    over: oneshot::Receiver<()>,
    seen: &Mutex<(Life, Status)>,
) {
    let tell = |status| see(seen, |seen| seen.1 = status);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let run = work(orders, Some(store), tell, async { drop(over.await) });
    if let Err(error) = runtime.map_err(Into::into).and_then(|runtime| runtime.block_on(run)) {
        see(seen, |seen| seen.0 = Life::Ended(error.to_string()));
    }
}

/// Takes in what a process says of itself, a line each time.
async fn listen(output: ChildStdout, seen: Arc<Mutex<(Life, Status)>>) {
    let mut lines = BufReader::new(output).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        if let Ok(status) = serde_json::from_str(&line) {
            see(&seen, |seen| seen.1 = status);
        }
    }
    see(&seen, |seen| {
        if seen.0 == Life::Runs {
            seen.0 = Life::Ended("it has ended by itself".into());
        }
    });
}

fn see<R>(seen: &Mutex<(Life, Status)>, with: impl FnOnce(&mut (Life, Status)) -> R) -> R {
    with(&mut seen.lock().unwrap_or_else(PoisonError::into_inner))
}

impl Member {
    /// Whether it lives, and how it stands.
    pub fn seen(&self) -> (Life, Status) {
        see(&self.seen, |seen| seen.clone())
    }

    fn lives(&self, life: Life) {
        see(&self.seen, |seen| seen.0 = life);
    }

    /// SIGKILL: it cannot say goodbye.
    pub async fn kill(&mut self) -> Result<(), String> {
        let Body::Process { child, .. } = &mut self.body else {
            return Err("only processes can be killed".into());
        };
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).0 = Life::Killed;
        child.kill().await.map_err(|e| format!("a member cannot be killed ({e})"))
    }

    /// SIGSTOP: its sockets stay open, and it knows nothing of it.
    pub fn stop(&mut self) -> Result<(), String> {
        self.signal(Blow::Stop)?;
        self.lives(Life::Stopped);
        Ok(())
    }

    /// SIGCONT.
    pub fn go_on(&mut self) -> Result<(), String> {
        self.signal(Blow::Continue)?;
        self.lives(Life::Runs);
        Ok(())
    }

    #[cfg(unix)]
    fn signal(&self, blow: Blow) -> Result<(), String> {
        use rustix::process::{Pid, Signal, kill_process};
        let Body::Process { child, .. } = &self.body else {
            return Err("only processes can be stopped".into());
        };
        let signal = match blow {
            Blow::Stop => Signal::STOP,
            Blow::Continue => Signal::CONT,
        };
        let pid = child.id().and_then(|id| Pid::from_raw(id.try_into().ok()?));
        let pid = pid.ok_or("a member has ended before it could be stopped")?;
        kill_process(pid, signal).map_err(|e| format!("a member cannot be stopped ({e})"))
    }

    #[cfg(not(unix))]
    fn signal(&self, _: Blow) -> Result<(), String> {
        Err("processes can only be stopped and continued on Unix".into())
    }

    /// Lets it end: it says goodbye. One that does not in time is killed.
    pub async fn end(mut self) {
        match &mut self.body {
            Body::Process { child, input } => {
                drop(input.take());
                let before = see(&self.seen, |seen| std::mem::replace(&mut seen.0, Life::Killed));
                if before == Life::Runs {
                    timeout(Duration::from_secs(3), child.wait()).await.ok();
                }
                child.kill().await.ok();
            }
            Body::Thread { end, thread } => {
                drop(end.take());
                if let Some(thread) = thread.take() {
                    tokio::task::spawn_blocking(move || thread.join()).await.ok();
                }
            }
        }
    }
}

#[derive(Clone, Copy)]
enum Blow {
    Stop,
    Continue,
}
