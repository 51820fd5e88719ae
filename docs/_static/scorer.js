// How Sphinx's search orders what it finds: its own scores, but names of the core before those of
// compat, which has some of the same. Sphinx reads this in place of its own table (`html_search_scorer`).
var Scorer = {
  score: ([docname, title, anchor, description, score]) =>
    docname.includes("compat") ? score - 10 : score,
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
