//! Log lines: to standard error, each with its rank.

use std::fmt::{self, Write as _};
use std::sync::OnceLock;

use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use super::options::LogArgs;
use super::output::LogWriter;
use crate::config::{Effective, LogFormat};
use crate::env::EnvVars;
use crate::exit::{Classify, Exit};

/// Known once MPI has started; lines before that carry `-`.
static RANK: OnceLock<u32> = OnceLock::new();

/// What is logged, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogSettings {
    /// A level or a list of directives.
    pub filter: String,
    /// Where the filter comes from, for messages.
    pub origin: String,
    /// How a line looks.
    pub format: LogFormat,
}

/// Why logging cannot start.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// A filter that is none.
    #[error(
        "{origin}: `{filter}` is no log filter; write off, error, warn, info, debug or trace, or directives such as lockstep::dispatch=trace,info"
    )]
    Filter {
        /// Where it comes from.
        origin: String,
        /// The filter.
        filter: String,
        /// What is wrong with it.
        #[source]
        source: tracing_subscriber::filter::ParseError,
    },
    /// Something else logs in this process.
    #[error("logging was started twice in this process")]
    Twice,
}

impl Classify for LogError {
    fn exit(&self) -> Exit {
        match self {
            Self::Filter { .. } => Exit::BadInput,
            Self::Twice => Exit::Bug,
        }
    }
}

impl LogSettings {
    /// `-v` over `LOCKSTEP_LOG` over the deployment's `log.level`.
    #[must_use]
    pub fn new(args: LogArgs, env: &EnvVars, effective: &Effective) -> Self {
        let log = &effective.deployment.log;
        let (filter, origin) = match (args.verbose, env.log_filter()) {
            (0, Some(filter)) => (filter.to_owned(), "LOCKSTEP_LOG".to_owned()),
            (0, None) => (log.level.clone(), format!("{}: log.level", effective.origin("log.level"))),
            (1, _) => ("debug".to_owned(), "-v".to_owned()),
            (_, _) => ("trace".to_owned(), "-vv".to_owned()),
        };
        Self { filter, origin, format: log.format }
    }

    fn filter(&self) -> Result<EnvFilter, LogError> {
        // A lone word that is no level would be read as the name of a module, and log nothing.
        let is_word = self.filter.chars().all(|c| c.is_ascii_alphanumeric());
        let filter = if is_word {
            self.filter.parse::<tracing::level_filters::LevelFilter>().map(|_| self.filter.as_str()).unwrap_or("=")
        } else {
            self.filter.as_str()
        };
        EnvFilter::builder().parse(filter).map_err(|source| LogError::Filter {
            origin: self.origin.clone(),
            filter: self.filter.clone(),
            source,
        })
    }

    /// Starts logging.
    ///
    /// # Errors
    /// If the filter is none, or logging has started already.
    pub fn start(&self) -> Result<(), LogError> {
        tracing_subscriber::fmt()
            .with_env_filter(self.filter()?)
            .with_writer(|| LogWriter)
            .event_format(Line { format: self.format })
            .try_init()
            .map_err(|_| LogError::Twice)
    }
}

/// Tells the log which rank this is; the first call stands.
pub fn set_rank(rank: u32) {
    let _ = RANK.set(rank);
}

fn rank() -> String {
    RANK.get().map_or_else(|| "-".to_owned(), ToString::to_string)
}

/// The form of a line.
struct Line {
    format: LogFormat,
}

/// An event's message and fields.
#[derive(Default)]
struct Fields {
    message: String,
    others: Vec<(&'static str, serde_json::Value)>,
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            self.message = format!("{value:?}");
        } else {
            self.others.push((field.name(), format!("{value:?}").into()));
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            self.message = value.to_owned();
        } else {
            self.others.push((field.name(), value.into()));
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.others.push((field.name(), value.into()));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.others.push((field.name(), value.into()));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.others.push((field.name(), value.into()));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.others.push((field.name(), value.into()));
    }
}

impl Fields {
    /// `message key=value ...`, on one line whatever the values hold.
    fn text(&self) -> String {
        let mut text = self.message.replace('\n', "\\n");
        for (name, value) in &self.others {
            let value = match value {
                serde_json::Value::String(value) if !value.contains([' ', '\n', '"']) => value.clone(),
                value => value.to_string(),
            };
            let _ = write!(text, " {name}={value}");
        }
        text
    }
}

impl<S, N> FormatEvent<S, N> for Line
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let mut time = String::new();
        SystemTime.format_time(&mut Writer::new(&mut time))?;
        let spans: Vec<&str> =
            context.event_scope().map(|scope| scope.from_root().map(|span| span.name()).collect()).unwrap_or_default();
        let (level, target) = (event.metadata().level(), event.metadata().target());
        match self.format {
            LogFormat::Text => {
                let within = spans.iter().map(|span| format!("{span}:")).collect::<String>();
                let within = if within.is_empty() { within } else { format!(" {within}") };
                writeln!(writer, "{time} {level:>5} rank={} {target}:{within} {}", rank(), fields.text())
            }
            LogFormat::Json => {
                let others: serde_json::Map<String, serde_json::Value> =
                    fields.others.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
                let line = serde_json::json!({
                    "time": time, "level": level.as_str(), "rank": RANK.get(), "target": target, "spans": spans,
                    "message": fields.message, "fields": others,
                });
                writeln!(writer, "{line}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Memory(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Memory {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().expect("not poisoned").extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn logged(format: LogFormat) -> String {
        let memory = Memory::default();
        let writer = memory.clone();
        let subscriber =
            tracing_subscriber::fmt().with_writer(move || writer.clone()).event_format(Line { format }).finish();
        tracing::subscriber::with_default(subscriber, || {
            let _span = tracing::info_span!("load").entered();
            tracing::info!(num_bytes = 7u64, path = "a b", ok = true, "read\nexperts");
        });
        let bytes = memory.0.lock().expect("not poisoned").clone();
        String::from_utf8(bytes).expect("text")
    }

    #[test]
    fn a_text_line_carries_rank_span_and_fields() {
        let line = logged(LogFormat::Text);
        let (_, rest) = line.split_once(' ').expect("a time");
        assert_eq!(
            rest,
            " INFO rank=- lockstep::cli::logging::tests: load: read\\nexperts num_bytes=7 path=\"a b\" ok=true\n"
        );
    }

    #[test]
    fn a_json_line_is_one_object() {
        let line = logged(LogFormat::Json);
        assert_eq!(line.matches('\n').count(), 1, "{line}");
        let value: serde_json::Value = serde_json::from_str(&line).expect("JSON");
        assert_eq!(value["fields"]["num_bytes"], 7);
        assert_eq!(value["message"], "read\nexperts");
        assert_eq!(value["spans"][0], "load");
        assert!(value["rank"].is_null() && value["time"].is_string());
    }

    #[test]
    fn the_louder_source_wins() {
        let with_log = EnvVars { lockstep: vec![("LOCKSTEP_LOG".into(), "warn".into())], ..EnvVars::default() };
        let settings = |verbose, env: &EnvVars| {
            LogSettings::new(LogArgs { verbose, ..LogArgs::default() }, env, &Effective::default()).filter
        };
        assert_eq!(settings(0, &EnvVars::default()), "info");
        assert_eq!(settings(0, &with_log), "warn");
        assert_eq!(settings(1, &with_log), "debug");
        assert_eq!(settings(3, &with_log), "trace");
    }

    #[test]
    fn filters_are_checked() {
        let filter = |filter: &str| {
            LogSettings { filter: filter.into(), origin: "LOCKSTEP_LOG".into(), format: LogFormat::Text }.filter()
        };
        for good in ["off", "info", "DEBUG", "lockstep::dispatch=trace,info"] {
            assert!(filter(good).is_ok(), "{good}");
        }
        for bad in ["loud", "lockstep=loud", "no"] {
            let error = filter(bad).expect_err(bad);
            assert_eq!(error.exit(), Exit::BadInput);
            assert!(error.to_string().starts_with("LOCKSTEP_LOG: "), "{error}");
        }
    }
}
