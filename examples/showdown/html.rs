//! One self-contained page: tables and plots, nothing loaded from elsewhere.

use std::fmt::Write as _;

use granule::units::{Bytes, MIB};
use plotters::coord::Shift;
use plotters::prelude::*;

use crate::output::{Everything, Row, time_of};
use crate::support::{Outcome, show};

const STYLE: &str = "body{font:15px/1.45 system-ui,sans-serif;max-width:75rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a}\
table{border-collapse:collapse;margin:.5rem 0 1.5rem;font-size:13px}\
td,th{border-bottom:1px solid #ddd;padding:.25rem .6rem;text-align:right;white-space:nowrap}\
td:first-child,th:first-child{text-align:left}\
.why{text-align:left;color:#777}.best{font-weight:600}svg{max-width:100%;height:auto}\
.note{color:#555}";

const COLOURS: [(&str, RGBColor); 7] = [
    ("remap", RGBColor(0, 114, 178)),
    ("copy compaction", RGBColor(213, 94, 0)),
    ("copy evacuation", RGBColor(230, 159, 0)),
    ("generational", RGBColor(204, 121, 167)),
    ("buddy", RGBColor(130, 130, 130)),
    ("lazy buddy", RGBColor(86, 180, 233)),
    ("hybrid", RGBColor(0, 158, 115)),
];

/// A strategy, its colour and its points.
type Series = (&'static str, RGBColor, Vec<(f64, f64)>);

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

pub fn page(all: &Everything<'_>) -> Outcome<String> {
    let mut text = format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>Making free memory \
         contiguous</title><style>{STYLE}</style><h1>Making free memory contiguous</h1><p>{}</p>",
        escaped(&all.machine)
    );
    text += "<p class=\"note\">A heap is fragmented and a block as large as the largest power of two \
             of its free pieces is asked for. \"Usable\" is the time from the request until the call \
             is back and the device has done everything before the block's first use. ";
    text += match all.checked {
        true => "Medians. Every live byte was checked afterwards.</p><ul>",
        false => "By a table, with planning as it took at the least on this machine.</p><ul>",
    };
    for line in all.verdicts {
        let _ = write!(text, "<li>{}</li>", escaped(line));
    }
    text += "</ul><h2>Half of the memory free, every other piece</h2>";
    text += &plot(|area| times(area, all.rows))?;
    text += "<p class=\"note\">Time until the block can be used, by the size of the pieces; both axes \
             logarithmic.</p>";
    text += &plot(|area| ratios(area, all.rows))?;
    text += "<p class=\"note\">The same, as a multiple of hybrid's time.</p>";
    if !all.slowdown.is_empty() {
        text += "<h2>Beside a kernel bound by memory bandwidth</h2>";
        text += &plot(|area| bars(area, all))?;
        text += "<table><tr><th>passes without pause<th>kernel<th>alone<th>slower<th>passes/s<th>granules/s</tr>";
        for slow in all.slowdown {
            let _ = write!(
                text,
                "<tr><td>{}<td>{}<td>{}<td>{:.2} %<td>{:.0}<td>{:.0}</tr>",
                escaped(&slow.name),
                show(slow.kernel),
                show(slow.quiet),
                slow.percent,
                slow.passes,
                slow.remaps
            );
        }
        text += "</table>";
    }
    if !all.rivals.is_empty() {
        text +=
            "<h2>Rivals</h2><table><tr><th>contender<th>case<th>usable<th>more memory<th>note</tr>";
        for rival in all.rivals {
            let _ = write!(
                text,
                "<tr><td>{}<td class=\"why\">{}<td>{:.1} us<td>{}<td class=\"why\">{}</tr>",
                escaped(&rival.contender),
                escaped(&rival.case),
                rival.usable_us,
                Bytes(rival.extra_memory as u64),
                escaped(&rival.note)
            );
        }
        text += "</table>";
    }
    text += "<h2>All cases</h2>";
    for rows in all.rows.chunk_by(|a, b| a.case == b.case) {
        text += &case(rows);
    }
    text += "<h2>What calls cost here</h2><pre>";
    text += &escaped(&crate::output::costs(all.table));
    text += "</pre></html>\n";
    Ok(text)
}

fn case(rows: &[Row]) -> String {
    let Some(first) = rows.first() else {
        return String::new();
    };
    let mut text = format!(
        "<h3>{}: {}</h3><p class=\"note\">{} wanted</p><table><tr><th>strategy<th>usable<th>predicted\
         <th>planning<th>caller waits<th>unmapped later<th>copied<th>driver calls<th>more memory<th>pointers \
         changed<th>busy stream: caller<th>late</tr>",
        first.case.group,
        escaped(&first.case.name),
        Bytes(first.case.want)
    );
    let best = rows.iter().filter_map(|r| r.usable).min();
    for row in rows {
        let name = escaped(&row.strategy);
        let Some(usable) = row.usable else {
            let why = escaped(row.why.as_deref().unwrap_or("not possible"));
            let _ = write!(
                text,
                "<tr><td>{name}<td colspan=11 class=\"why\">{why}</tr>"
            );
            continue;
        };
        let shown = |time: Option<std::time::Duration>| time.map_or("-".to_owned(), show);
        let class = if Some(usable) == best {
            " class=\"best\""
        } else {
            ""
        };
        let _ = write!(
            text,
            "<tr><td>{name}<td{class}>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}</tr>",
            show(usable),
            shown(row.predicted),
            shown(row.planning),
            shown(row.host),
            shown(row.later),
            Bytes(row.copied),
            row.calls,
            Bytes(row.extra),
            row.pointers,
            shown(row.busy.map(|b| b.0)),
            shown(row.busy.map(|b| b.1)),
        );
    }
    text + "</table>"
}

fn plot(draw: impl FnOnce(&DrawingArea<SVGBackend<'_>, Shift>) -> Outcome) -> Outcome<String> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (900, 420)).into_drawing_area();
        area.fill(&WHITE)?;
        draw(&area)?;
        area.present()?;
    }
    Ok(svg)
}

/// Points of each strategy: size in MiB, what `of` makes of size and time.
fn series(rows: &[Row], of: impl Fn(u64, f64) -> Option<f64>) -> Vec<Series> {
    let mut sizes: Vec<u64> = rows
        .iter()
        .filter(|r| r.case.group == "half free")
        .map(|r| r.case.piece)
        .collect();
    sizes.dedup();
    let all = COLOURS.map(|(name, colour)| {
        let points = sizes.iter().filter_map(|piece| {
            let time = time_of(rows, *piece, name)?;
            Some(((piece / MIB) as f64, of(*piece, time)?))
        });
        (name, colour, points.collect::<Vec<_>>())
    });
    all.into_iter().filter(|s| !s.2.is_empty()).collect()
}

fn times(area: &DrawingArea<SVGBackend<'_>, Shift>, rows: &[Row]) -> Outcome {
    let all = series(rows, |_, time| Some(time * 1e6));
    lines(area, "time until usable (us)", &all)
}

fn ratios(area: &DrawingArea<SVGBackend<'_>, Shift>, rows: &[Row]) -> Outcome {
    let all = series(rows, |piece, time| {
        Some(time / time_of(rows, piece, "hybrid")?)
    });
    lines(area, "times hybrid's", &all)
}

fn lines(area: &DrawingArea<SVGBackend<'_>, Shift>, label: &str, all: &[Series]) -> Outcome {
    let points = || all.iter().flat_map(|s| s.2.iter().copied());
    let low = |get: fn((f64, f64)) -> f64| points().map(get).fold(f64::INFINITY, f64::min);
    let high = |get: fn((f64, f64)) -> f64| points().map(get).fold(0.0, f64::max);
    if points().next().is_none() {
        return Ok(());
    }
    let x: fn((f64, f64)) -> f64 = |p| p.0;
    let y: fn((f64, f64)) -> f64 = |p| p.1;
    // Beside the plot: wherever the names stood in it, lines would cross them.
    let (width, _) = area.dim_in_pixel();
    let (plot, names) = area.split_horizontally(width.saturating_sub(150));
    let mut chart = ChartBuilder::on(&plot)
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(64)
        .build_cartesian_2d(
            (low(x) * 0.9..high(x) * 1.1).log_scale(),
            (low(y) * 0.8..high(y) * 1.25).log_scale(),
        )?;
    chart
        .configure_mesh()
        .x_desc("size of a piece (MiB)")
        .y_desc(label)
        .light_line_style(WHITE)
        .draw()?;
    for (i, (name, colour, points)) in (0..).zip(all) {
        let width = if *name == "hybrid" { 3 } else { 2 };
        let style = colour.stroke_width(width);
        chart.draw_series(LineSeries::new(points.iter().copied(), style))?;
        // Rows of 24 pixels.
        let y = 24 + 24 * i;
        names.draw(&PathElement::new([(4, y), (28, y)], style))?;
        names.draw(&Text::new(*name, (36, y - 7), ("sans-serif", 14)))?;
    }
    Ok(())
}

fn bars(area: &DrawingArea<SVGBackend<'_>, Shift>, all: &Everything<'_>) -> Outcome {
    let n = all.slowdown.len();
    let high = all.slowdown.iter().map(|s| s.percent).fold(3.5, f64::max);
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..n as f64, 0.0..high * 1.15)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(n * 2 + 1)
        .x_label_formatter(&|x| {
            let at = (x - 0.5).round();
            let here = (x - 0.5 - at).abs() < 0.01;
            let slow = all.slowdown.get(at as usize).filter(|_| here && at >= 0.0);
            slow.map_or(String::new(), |s| s.name.replace(", pieces of", ""))
        })
        .y_desc("kernel slower (%)")
        .draw()?;
    chart.draw_series(all.slowdown.iter().zip(0..).map(|(slow, i)| {
        let colour = if slow.is_remap {
            COLOURS[0].1
        } else {
            COLOURS[2].1
        };
        let at = f64::from(i);
        Rectangle::new(
            [(at + 0.2, 0.0), (at + 0.8, slow.percent.max(0.0))],
            colour.filled(),
        )
    }))?;
    chart.draw_series(LineSeries::new(
        [(0.0, 3.0), (n as f64, 3.0)],
        BLACK.stroke_width(1),
    ))?;
    Ok(())
}
